"""``generate`` tells what its steps ran as: the table and the histogram, over a real scheduler."""

import json
from pathlib import Path

import pytest
from byte_model import write_byte_model

from lockstep.launcher.cli import guarded
from lockstep.launcher.graph_stats import graph_table
from lockstep.launcher.local import start_inline_engine
from lockstep.worker.schedule.stats import GraphUse


def run(folder: Path, *argv: str) -> int:
    model = write_byte_model(folder)
    base = ["generate", "--model", model, "--device", "cpu", "--load-format", "dummy", "--raw"]
    limits = ["--max-num-seqs", "4", "--max-num-batched-tokens", "8", "--ignore-eos"]
    return guarded([*base, *limits, *argv], start_inline_engine)


def test_table_and_histogram_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "batches.json"
    code = run(
        tmp_path, "abc", "def", "--max-tokens", "5",
        "--graph-stats", "--batch-histogram", str(target),
    )  # fmt: skip
    err = capsys.readouterr().err
    assert code == 0
    assert json.loads(target.read_text()) == {"2": 4, "6": 1}
    rows = [line.split() for line in err.splitlines()]
    assert ["FULL", "2", "1", "4", "8", "0", "0.00"] in rows
    [eager] = [row for row in rows if row[:1] == ["EAGER"]]
    assert eager[1:7] == ["own", "mixed", "1", "6", "0", "0.00"]
    assert "4 of 5 steps replayed graphs (80.00 %)" in err


def test_a_histogram_that_cannot_be_written_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "a", "--batch-histogram", str(tmp_path / "no" / "b.json")) == 2
    err = capsys.readouterr().err
    assert "--batch-histogram" in err and "its folder does not exist" in err


def test_padding_is_a_share_of_what_was_computed() -> None:
    use = GraphUse(
        run_mode="FULL", num_tokens_padded=8, uniform_query_len=1,
        num_steps=2, num_tokens=10, num_padding_tokens=6,
    )  # fmt: skip
    table = graph_table([use])
    assert [next(iter(column.cells)) for column in table.columns] == [
        "FULL", "8", "1", "2", "10", "6", "37.50", "",
    ]  # fmt: skip
