"""``lockstep profile`` on one GPU and on two."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lockstep.launcher.cli import main

MODEL = Path(__file__).parents[1] / "data" / "models" / "qwen3-0.6b"
LAYERS = json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]


def profiled(tmp_path: Path, *argv: str) -> dict[str, Any]:
    found = tmp_path / "found.json"
    written = ["--json", str(found), "--plot", str(tmp_path / "found.png")]
    assert main(["profile", "--model", str(MODEL), "--load-format", "dummy", *argv, *written]) == 0
    report: dict[str, Any] = json.loads(found.read_text())
    assert report["machine"]["is_gpu"]
    return report


def check(batch: dict[str, Any]) -> None:
    eager, graphs = batch["eager"], batch["graphs"]
    assert graphs["costs"]["num_submissions"] == 3
    assert eager["costs"]["num_submissions"] == eager["costs"]["num_operations"]
    assert graphs["costs"]["step_us"] < eager["costs"]["step_us"]
    assert graphs["floor_us"] < graphs["costs"]["device_us"]
    for step in (eager, graphs):
        calls = Counter[str]()
        for kernel in step["kernels"]:
            calls[kernel["role"]] += kernel["calls"]
        assert [calls[role] for role in ("qkv", "o", "gate_up", "down")] == [LAYERS] * 4
        assert calls["lm_head"] == 1


@pytest.mark.gpu
def test_a_step_of_one_gpu(tmp_path: Path) -> None:
    for batch in profiled(tmp_path, "--batch", "1", "32")["batches"]:
        check(batch)


@pytest.mark.multigpu
def test_a_step_of_two_gpus(tmp_path: Path) -> None:
    report = profiled(tmp_path, "-tp", "2", "--batch", "1")
    assert report["tensor_parallel_size"] == 2
    check(report["batches"][0])
