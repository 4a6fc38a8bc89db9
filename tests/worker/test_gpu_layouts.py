"""All GPUs in every layout of TP x DP: graph = eager = one GPU in float32, and who is at fault."""

import re

import msgspec
import pytest
from gpu_rig import gpu_config, gpu_requests
from layouts import Told, layouts, name_of, serve_layouts
from lockstep_ranks import run_but_skip
from ranks import num_gpus, rank_outcomes, run_ranks

from lockstep.comm.errors import CommError, RankMismatch
from lockstep.parallel.config import ParallelConfig

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(300)]

MODES = ("NONE", "FULL_AND_PIECEWISE")
SIZES = (1, 2, 4, 8, 16, 24, 128)


def served(layout: ParallelConfig, modes: tuple[str, ...]) -> list[list[Told]]:
    """What each rank tells in each mode."""
    configs = [
        gpu_config(
            parallel=layout, graph_mode=mode, max_num_batched_tokens=128, capture_sizes=SIZES
        )
        for mode in modes
    ]
    data = [[msgspec.msgpack.encode(config) for config in configs]]
    adds = gpu_requests(30, max_tokens=24)
    ranks = run_ranks(
        serve_layouts, layout.world_size, data, adds, "cuda", gloo=False, timeout_s=240
    )
    return [told for [told] in ranks]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Tokens of one GPU without graphs."""
    [[told]] = served(ParallelConfig(), MODES[:1])
    return told.tokens


@pytest.mark.parametrize("layout", layouts(num_gpus()), ids=name_of)
def test_eager_and_as_graphs_with_one_manifest_and_one_ledger(layout, expected) -> None:
    first, *others = served(layout, MODES)
    assert [told.tokens for told in first] == [expected] * len(MODES)
    assert all(rank == first for rank in others)
    assert any(first[-1].ledgers)


def test_a_replica_that_skips_a_step_is_named_by_all() -> None:
    layout = layouts(num_gpus())[-1]
    config = msgspec.msgpack.encode(gpu_config(parallel=layout, graph_mode="NONE"))
    *others, skipped = rank_outcomes(
        run_but_skip, num_gpus(), config, "cuda", gloo=False, timeout_s=200
    )
    last = num_gpus() - 1
    assert isinstance(skipped.error, RankMismatch), skipped
    assert str(skipped.error) == f"rank {last} got step 2, but its next step is 1"
    # A process that still closes its GPU is not gone yet; then it is the one that says nothing.
    for other in others:
        assert isinstance(other.error, CommError), other
        assert re.search(rf"ranks? \[?{last}\b", str(other.error)), other.error
