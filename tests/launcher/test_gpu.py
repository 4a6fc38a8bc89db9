"""Asking about GPUs without opening a context on one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from byte_model import write_byte_model

from lockstep.launcher.cli import main
from lockstep.launcher.gpu import gpu_capability

ALONE = ["--load-format", "dummy", "--device", "cuda"]


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("profile --batch 1 -tp 2", "cuda:1 is not there: this process sees 1 GPU(s)"),
        ("bench decode --batch 1", "cuda:0 is not there: this process sees 0 GPU(s)"),
        ("bench prefill --num-chunks 1 2", "cuda:0 is not there: this process sees 0 GPU(s)"),
    ],
)
def test_a_command_that_needs_more_gpus_than_there_are_ends_with_the_flag(
    tmp_path: Path, monkeypatch, capsys, command: str, missing: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int("-tp 2" in command))
    short = ["--max-num-batched-tokens", "64"] if "prefill" in command else []
    assert main([*command.split(), "--model", write_byte_model(tmp_path), *ALONE, *short]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "..." not in line]
    assert told == [f"lockstep: --device=cuda: {missing}, CUDA_VISIBLE_DEVICES='7'"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_capability() -> None:
    assert gpu_capability() is None


@pytest.mark.gpu
def test_the_driver_is_asked_and_no_context_opened() -> None:
    check = (
        "import torch\n"
        "from lockstep.launcher.gpu import gpu_capability\n"
        "found = gpu_capability()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert found == torch.cuda.get_device_capability(0), found\n"
    )
    subprocess.run([sys.executable, "-P", "-c", check], check=True, timeout=100)
