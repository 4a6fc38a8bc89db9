"""``generate`` tells what its steps ran as: the table and the histogram, over a real scheduler."""

import json
from collections import Counter
from pathlib import Path

import pytest
from byte_model import write_byte_model
from inline_engine import start_inline_engine

from lockstep.launcher.cli import guarded
from lockstep.launcher.graph_stats import graph_table
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.schedule.stats import GraphUse

RUN_MODES = {mode.name for mode in RunMode}


def run(folder: Path, *argv: str) -> int:
    model = write_byte_model(folder)
    base = ["generate", "--model", model, "--device", "cpu", "--load-format", "dummy", "--raw"]
    limits = [
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "8",
        "--num-gpu-blocks-override",
        "64",
    ]
    return guarded([*base, *limits, "--ignore-eos", *argv], start_inline_engine)


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
    assert ["PIECEWISE", "8", "mixed", "1", "6", "2", "25.00"] in rows
    assert "5 of 5 steps replayed graphs (100.00 %)" in err


@pytest.mark.parametrize(
    ("flags", "mode", "counts"),
    [
        ("-O0", "NONE", {"EAGER": 5}),
        ("-O1", "PIECEWISE", {"PIECEWISE": 5}),
        ("-O2", "FULL_AND_PIECEWISE", {"PIECEWISE": 1, "FULL": 4}),
        ("-O3", "FULL_AND_PIECEWISE", {"PIECEWISE": 1, "FULL": 4}),
        ("--enforce-eager -O3", "NONE", {"EAGER": 5}),
        ("-O0 --cudagraph-mode FULL_DECODE_ONLY", "FULL_DECODE_ONLY", {"EAGER": 1, "FULL": 4}),
        (
            "--cudagraph-mode FULL",
            "FULL_AND_PIECEWISE (FULL was asked for)",
            {"PIECEWISE": 1, "FULL": 4},
        ),
        (
            "--cudagraph-capture-sizes 2 1",
            "FULL_AND_PIECEWISE",
            {"EAGER": 1, "FULL": 4},
        ),
        ("--max-cudagraph-capture-size 1", "FULL_AND_PIECEWISE", {"EAGER": 5}),
        ("--performance-mode interactivity", "FULL_AND_PIECEWISE", {"PIECEWISE": 1, "FULL": 4}),
    ],
)
def test_every_way_to_choose_graphs(
    flags: str, mode: str, counts: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A step of six prompt tokens and four of two decodes."""
    argv = ("abc", "def", "--max-tokens", "5", "--graph-stats", *flags.split())
    assert run(tmp_path, *argv) == 0
    err = capsys.readouterr().err
    assert f"graph mode {mode}, " in err
    steps: Counter[str] = Counter()
    for row in map(str.split, err.splitlines()):
        if row and row[0] in RUN_MODES:
            steps[row[0]] += int(row[3])
    assert steps == counts
    downgrade = "lockstep: FULL -> FULL_AND_PIECEWISE: mixed batches need attention support ALWAYS"
    assert err.count(downgrade) == ("asked for" in mode)


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
