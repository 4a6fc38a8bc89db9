"""``lockstep profile`` from its flags to text, JSON and picture, on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from byte_model import CONFIG, write_byte_model

from lockstep.launcher.cli import main
from lockstep.worker import ceiling

PNG = b"\x89PNG"
LAYERS = CONFIG["num_hidden_layers"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ceiling, "_CPU_BYTES", 4 << 20)
    return write_byte_model(tmp_path)


def profile(*argv: str) -> int:
    return main(["profile", "--device", "cpu", "--load-format", "dummy", *argv])


def check_step(step: dict[str, Any], num_reqs: int, num_tokens: int) -> None:
    costs, kernels = step["costs"], step["kernels"]
    assert (step["num_reqs"], step["num_tokens"]) == (num_reqs, num_tokens)
    assert step["context_len"] == 16 + 1 + 2 * 3 + 5 * 2
    assert costs["device"] == "CPU"
    assert costs["num_operations"] == costs["num_submissions"] == len(step["timeline"])
    assert sum(kernel["calls"] for kernel in kernels) == costs["num_operations"]
    assert sum(kernel["time_us"] for kernel in kernels) == pytest.approx(costs["device_us"])
    calls = {kernel["role"]: kernel["calls"] for kernel in kernels}
    products = {"qkv": LAYERS, "o": LAYERS, "gate_up": LAYERS, "down": LAYERS, "lm_head": 1}
    assert {role: calls.get(role) for role in products} == products
    [head] = [kernel for kernel in kernels if kernel["role"] == "lm_head"]
    hidden, vocab = CONFIG["hidden_size"], CONFIG["vocab_size"]
    assert head["num_bytes"] == 4 * (hidden * vocab + num_tokens * (hidden + vocab))
    assert 0 < head["ceiling_share"]
    assert step["explanation"].startswith(step["bound"])


def test_profile_of_two_batches(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, picture = tmp_path / "found.json", tmp_path / "found.png"
    measured = ["--batch", "1", "3", "--input-len", "16", "--steps", "3", "--repetitions", "1"]
    written = ["--rows", "4", "--json", str(found), "--plot", str(picture)]
    assert profile("--model", model, *measured, *written) == 0
    report = json.loads(found.read_text())
    assert report["machine"]["launch_us"] > 0 and not report["machine"]["is_gpu"]
    for batch, num_reqs, padded in zip(report["batches"], (1, 3), (1, 4), strict=True):
        assert [batch[way]["run_mode"] for way in ("eager", "graphs")] == ["EAGER", "FULL"]
        check_step(batch["eager"], num_reqs, num_reqs)
        check_step(batch["graphs"], num_reqs, padded)
    assert picture.read_bytes().startswith(PNG)
    out = capsys.readouterr().out
    assert "without graphs" in out and "with graphs" in out
    assert report["batches"][0]["eager"]["explanation"] in out
    assert "others" in out and "% of ceiling" in out


def test_two_ranks_and_a_batch_that_no_graph_serves(model: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    measured = ["--batch", "2", "--input-len", "2", "--steps", "1", "--repetitions", "1"]
    split = ["-tp", "2", "--cudagraph-mode", "NONE"]
    assert profile("--model", model, *measured, *split, "--json", str(found)) == 0
    report = json.loads(found.read_text())
    assert report["tensor_parallel_size"] == 2
    [batch] = report["batches"]
    assert batch["graphs"] is None
    [head] = [each for each in batch["eager"]["kernels"] if each["role"] == "lm_head"]
    hidden, half = CONFIG["hidden_size"], CONFIG["vocab_size"] // 2
    assert head["num_bytes"] == 4 * (hidden * half + 2 * (hidden + half))


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--batch 0", ["batch", "0", ">= 1"]),
        ("--steps 0", ["--steps", "0", ">= 1"]),
        ("--input-len 400", ["--input-len 400", "131", "532", "512"]),
        ("--plot there.pdf", ["--plot", ".png", "there.pdf"]),
        ("--json /nowhere/found.json", ["--json /nowhere/found.json", "does not exist"]),
        ("-dp 2", ["-dp 2"]),
        ("-tp 3", ["num_heads=2", "3"]),
        ("--model nowhere/at-all", ["nowhere/at-all"]),
    ],
)
def test_refusals_are_one_line(
    model: str, capsys: pytest.CaptureFixture[str], argv: str, named: list[str]
) -> None:
    given = [] if "--model" in argv else ["--model", model]
    assert profile(*given, *argv.split()) == 2
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if "..." not in line]
    assert not out
    for text in named:
        assert text in line
