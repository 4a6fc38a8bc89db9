"""More ranks than two, in every layout of TP x DP: the tokens of one rank, and who is at fault.

LOCKSTEP_TEST_RANKS sets how many (4); `make ranks RANKS=8` does so.
"""

import os
import signal

import msgspec
import pytest
from inline import LOUD_TINY, request, worker_config
from inline import serve as serve_inline
from layouts import Told, layouts, name_of, serve_layouts
from lockstep_ranks import run_but_skip, serve_on_ranks
from msgspec.structs import replace
from ranks import Outcome, Rank, rank_outcomes, run_ranks

from lockstep.comm.errors import PeerLost, RankMismatch
from lockstep.comm.messages import AddRequest, StepPlan
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.config import GraphConfig, GraphModeName, WorkerConfig
from lockstep.worker.loop import Worker

NUM_RANKS = int(os.environ.get("LOCKSTEP_TEST_RANKS", "4"))
LAYOUTS = {name_of(layout): layout for layout in layouts(NUM_RANKS)}
LAST = NUM_RANKS - 1
# Of the layouts in which ranks fail: one in which a rank has peers along two axes, unless asked.
TRIED = list(LAYOUTS) if "LOCKSTEP_TEST_RANKS" in os.environ else ["TP2xDP2"]
TIMEOUT_S = 60.0 * NUM_RANKS

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def config_of(layout: ParallelConfig, mode: GraphModeName) -> WorkerConfig:
    """Of a model with a query head for each of eight ranks, and fewer key-value heads than that."""
    parallel = replace(layout, timeout_s=TIMEOUT_S / 2)
    config = worker_config(parallel=parallel, max_num_batched_tokens=8, max_num_seqs=2)
    graph = GraphConfig(mode=mode, capture_sizes=(2, 8))
    return replace(config, model=replace(LOUD_TINY, num_heads=8), graph=graph)


def adds() -> list[AddRequest]:
    """For some replicas two, for others none: greedy and sampled, longer than a step's tokens."""
    prompts = [[5, 17, 3], [44, 9, 9, 61, 2, 80, 33, 12, 12, 7], [12]]
    sampled = {"temperature": 0.9, "seed": 5, "top_k": 20}
    return [
        request(f"{i}", prompt, max_tokens=6, **(sampled if i == 1 else {}))
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def told() -> dict[str, list[Told]]:
    """Of each layout, of each rank."""
    configs = [config_of(layout, "FULL_AND_PIECEWISE") for layout in LAYOUTS.values()]
    data = [[msgspec.msgpack.encode(config)] for config in configs]
    ranks = run_ranks(serve_layouts, NUM_RANKS, data, adds(), gloo=False, timeout_s=TIMEOUT_S)
    return {
        layout: [told for [told] in seen]
        for layout, seen in zip(LAYOUTS, zip(*ranks, strict=True), strict=True)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs_of_every_layout_give_the_tokens_of_one_eager_rank(told, layout: str) -> None:
    expected = serve_inline(config_of(ParallelConfig(), "NONE"), adds())[0].tokens
    assert [rank.tokens for rank in told[layout]] == [expected] * NUM_RANKS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_list_the_same_graphs_and_the_same_communication(told, layout: str) -> None:
    first, *others = told[layout]
    assert all(rank == first for rank in others)
    assert any(first.ledgers)


@pytest.mark.parametrize("layout", TRIED)
def test_a_rank_that_skips_a_step_is_named_by_all(layout: str) -> None:
    config = msgspec.msgpack.encode(config_of(LAYOUTS[layout], "NONE"))
    *others, skipped = rank_outcomes(
        run_but_skip, NUM_RANKS, config, gloo=False, timeout_s=TIMEOUT_S
    )
    assert isinstance(skipped.error, RankMismatch), skipped
    assert str(skipped.error) == f"rank {LAST} got step 2, but its next step is 1"
    assert [lost(other) for other in others] == [LAST] * LAST


def killed_while_serving(rank: Rank, config_bytes: bytes) -> None:
    """The last rank dies at its third plan, while the others take that step."""
    launch, plans = Worker.launch, []

    def launched(worker: Worker, plan: StepPlan):
        plans.append(plan)
        if (rank.rank, len(plans)) == (LAST, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        yield from launch(worker, plan)

    Worker.launch = launched
    serve_on_ranks(rank, config_bytes, adds())


@pytest.mark.parametrize("layout", TRIED)
def test_a_killed_rank_is_named_by_all_and_leaves_nothing(layout: str) -> None:
    config = msgspec.msgpack.encode(config_of(LAYOUTS[layout], "NONE"))
    shared_memory = set(os.listdir("/dev/shm"))
    *others, killed = rank_outcomes(
        killed_while_serving, NUM_RANKS, config, gloo=False, timeout_s=TIMEOUT_S
    )
    assert killed.exit_code == -signal.SIGKILL
    assert [lost(other) for other in others] == [LAST] * LAST
    assert set(os.listdir("/dev/shm")) <= shared_memory


def lost(outcome: Outcome) -> int:
    """Whom a rank says it has lost."""
    assert isinstance(outcome.error, PeerLost), outcome
    return outcome.error.global_rank
