"""Every row of the mode table, and that reasons are given exactly for steps down."""

import json
from pathlib import Path

import pytest

from lockstep.worker.graphs.mode import (
    AttentionSupport,
    GraphMode,
    RunMode,
    mode_of_level,
    resolve_mode,
)

VECTORS = json.loads((Path(__file__).parents[1] / "data/mode_vectors.json").read_text())["vectors"]


@pytest.mark.parametrize("row", VECTORS, ids=lambda row: "-".join(map(str, row.values())))
def test_vector(row: dict) -> None:
    support = AttentionSupport[row["support"]]
    args = (row["requested"], support, row["query_len"], row["piecewise_available"])
    if row["expect"] == "ERROR":
        with pytest.raises(ValueError, match="NEVER.*ask for PIECEWISE or NONE"):
            resolve_mode(*args)
        return
    resolved = resolve_mode(*args)
    assert resolved.mode == row["expect"]
    assert bool(resolved.reasons) == (row["expect"] != row["requested"])


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("support", AttentionSupport)
@pytest.mark.parametrize("split", [True, False])
def test_resolving_twice_changes_nothing(
    query_len: int, support: AttentionSupport, split: bool
) -> None:
    for requested in GraphMode:
        if requested is GraphMode.FULL and support is AttentionSupport.NEVER:
            continue
        mode = resolve_mode(requested, support, query_len, split).mode
        assert resolve_mode(mode, support, query_len, split) == (mode, ())


def test_reasons_chain_from_the_wish_to_the_result() -> None:
    support = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
    mode, reasons = resolve_mode("FULL", support, 4, True)
    assert mode is GraphMode.PIECEWISE
    assert [reason.split(":")[0] for reason in reasons] == [
        "FULL -> FULL_AND_PIECEWISE",
        "FULL_AND_PIECEWISE -> PIECEWISE",
    ]


def test_parts_and_levels() -> None:
    assert (GraphMode.FULL_AND_PIECEWISE.decode, GraphMode.FULL_AND_PIECEWISE.mixed) == (
        RunMode.FULL,
        RunMode.PIECEWISE,
    )
    assert min(RunMode.FULL, RunMode.EAGER, RunMode.PIECEWISE) is RunMode.EAGER
    levels = ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"]
    assert [mode_of_level(level) for level in range(4)] == levels
    with pytest.raises(ValueError, match=r"\[0, 3\], got 4"):
        mode_of_level(4)


def test_unknown_mode_names_the_choices() -> None:
    with pytest.raises(ValueError, match="one of NONE, .*got 'full'"):
        resolve_mode("full", AttentionSupport.ALWAYS, 1, True)
