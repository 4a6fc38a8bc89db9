"""Every eager batch has a reason, and no other has one."""

import pytest
from grids import grids
from hypothesis import given
from hypothesis import strategies as st

from lockstep.parallel.agreement import Proposal, agree
from lockstep.worker.graphs.dispatch import Dispatcher
from lockstep.worker.graphs.fallback import eager_reason, fallback_reason
from lockstep.worker.graphs.grid import Grid, build_grid
from lockstep.worker.graphs.mode import GraphMode, RunMode


def dispatcher(mode: str, seqs: int = 8) -> Dispatcher:
    grid = build_grid(max_num_seqs=seqs, max_num_batched_tokens=4096)
    return Dispatcher(grid, GraphMode(mode))


@pytest.mark.parametrize(
    ("mode", "batch", "reason"),
    [
        ("NONE", (1, 1, 1), "the graph mode is NONE"),
        ("FULL_AND_PIECEWISE", (17, 2, 0), "mixed batch above 16 tokens"),
        ("FULL_DECODE_ONLY", (9, 9, 1), "decode batch above 8 tokens"),
        ("FULL_DECODE_ONLY", (9, 8, 0), "FULL_DECODE_ONLY has no graphs for mixed batches"),
        ("PIECEWISE", (17, 17, 1), "mixed batch above 16 tokens"),
        ("FULL", (9, 9, 0), "more requests than the graph of its size holds"),
        ("FULL", (9, 8, 0, 2), "no graph was captured for active adapters"),
        ("FULL", (9, 8, 0), ""),
    ],
)
def test_reasons(mode: str, batch: tuple[int, ...], reason: str) -> None:
    assert eager_reason(dispatcher(mode), *batch) == reason


@given(grids(), st.sampled_from(GraphMode), st.data())
def test_a_reason_exactly_for_eager_batches(
    grid: Grid, mode: GraphMode, data: st.DataObject
) -> None:
    one = Dispatcher(grid, mode)
    tokens = data.draw(st.integers(1, grid.max_num_batched_tokens))
    reqs = data.draw(st.integers(1, tokens))
    query_len = data.draw(st.sampled_from([0, grid.query_len]))
    eager = one.dispatch(tokens, reqs, query_len)[0] is RunMode.EAGER
    assert bool(eager_reason(one, tokens, reqs, query_len)) == eager


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        ([(3, 3, 1, 0, 2), (20, 3, 0, 0, 2)], "mixed batch above 16 tokens"),
        ([(3, 3, 1, 0, 2), (3, 3, 1, 0, 0)], "graphs were held back for the step"),
        ([(0, 0, 1, 0, 2), (20, 3, 0, 0, 2)], "mixed batch above 16 tokens"),
    ],
)
def test_the_replica_that_makes_a_group_eager(batches: list[tuple], reason: str) -> None:
    proposals = [Proposal(*batch) for batch in batches]
    assert agree(proposals, dispatcher("FULL_AND_PIECEWISE").dispatch).run_mode == RunMode.EAGER
    assert fallback_reason(dispatcher("FULL_AND_PIECEWISE"), proposals) == reason


def test_replicas_whose_graphs_do_not_serve_the_others() -> None:
    one = dispatcher("FULL_AND_PIECEWISE", seqs=600)
    proposals = [Proposal(590, 590, 1, 0, 2), Proposal(5, 2, 0, 0, 2)]
    assert agree(proposals, one.dispatch).run_mode == RunMode.EAGER
    assert fallback_reason(one, proposals).startswith("no graph that serves every replica")
