"""Graph modes on a GPU: the same tokens, graphs wherever the mode says so, nothing new later."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from compilations import compilations
from gpu_rig import MAX_LANES, GpuRig, gpu_config, gpu_requests, prompt_of
from inline import Served, make_scheduler, request, run_turns

from lockstep.comm.messages import AddRequest, ReplicaPlan
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.schedule.stats import SchedulerStats

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# Every mixed batch has a graph: at most 128 tokens a step, and a size for them.
SIZES = (1, 2, 4, 8, 16, 24, 48, 128)
RAN = {
    "NONE": {RunMode.EAGER},
    "PIECEWISE": {RunMode.PIECEWISE},
    "FULL_DECODE_ONLY": {RunMode.EAGER, RunMode.FULL},
    "FULL_AND_PIECEWISE": {RunMode.PIECEWISE, RunMode.FULL},
    "FULL": {RunMode.FULL},
}
NUM_REQUESTS = 3 * MAX_LANES
# Far more than bfloat16 rounds a log-probability of these logits by, far less than they spread.
NEAR_TIE = 0.1


def requests(**sampling: object) -> list[AddRequest]:
    """Of many lengths, so that prompts keep coming in beside decodes."""
    return [
        request(f"r{i}", prompt_of(i % MAX_LANES), max_tokens=12 + 5 * (i % 7), **sampling)
        for i in range(NUM_REQUESTS)
    ]


def serve(rig: GpuRig, *waves: list[AddRequest]) -> tuple[Served, SchedulerStats]:
    """One wave after the other, each to its end."""
    scheduler, served = make_scheduler(rig.worker.config, rig.ready.num_blocks), Served()
    for adds in waves:
        for add in adds:
            scheduler.add(add)
        run_turns(rig.worker, scheduler, served)
        scheduler.check_conserved()
    return served, scheduler.stats()


@contextmanager
def started(mode: str, dtype: str = "float32", **options: object) -> Iterator[GpuRig]:
    config = gpu_config(
        graph_mode=mode, dtype=dtype, max_num_batched_tokens=128, capture_sizes=SIZES, **options
    )
    rig = GpuRig(config)
    try:
        yield rig
    finally:
        rig.close()


def served_in(
    mode: str, dtype: str = "float32", *, compile: bool = False, **sampling: object
) -> Served:
    with started(mode, dtype, compile=compile) as rig:
        served, _ = serve(rig, requests(**sampling))
        ran = {run_mode for run_mode, steps in rig.worker.metrics.num_steps.items() if steps}
    assert ran == RAN[mode]
    return served


@pytest.fixture(scope="module")
def eager_tokens() -> dict[str, list[int]]:
    return served_in("NONE").tokens


@pytest.mark.parametrize("mode", [mode for mode in RAN if mode != "NONE"])
def test_tokens_in_float32_are_those_of_eager_steps(mode: str, eager_tokens) -> None:
    assert served_in(mode).tokens == eager_tokens
    assert len({tuple(tokens) for tokens in eager_tokens.values()}) > MAX_LANES // 2


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_compiled_segments_give_the_tokens_in_float32(mode: str, eager_tokens) -> None:
    """A step that would have to be compiled while serving would end the worker."""
    assert served_in(mode, compile=True).tokens == eager_tokens


def first_difference(one: list[int], other: list[int]) -> int | None:
    pairs = enumerate(zip(one, other, strict=True))
    return next((at for at, (left, right) in pairs if left != right), None)


@pytest.fixture(scope="module")
def eager_bfloat16() -> Served:
    return served_in("NONE", "bfloat16", logprobs=2)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE", "FULL"])
def test_tokens_in_bfloat16_differ_first_at_a_near_tie(mode: str, eager_bfloat16: Served) -> None:
    served, num_same = served_in(mode, "bfloat16", logprobs=2), 0
    for req_id, expected in eager_bfloat16.tokens.items():
        at = first_difference(served.tokens[req_id], expected)
        num_same += at is None
        if at is not None:
            best, second = eager_bfloat16.logprobs[req_id][at].top_logprobs
            assert best - second < NEAR_TIE, f"{mode}, {req_id}, token {at}"
    assert num_same > NUM_REQUESTS // 4


def test_decode_steps_are_replays_without_exception() -> None:
    """All requests at once and equally long: one prompt step each lane, then decode alone."""
    with started("FULL_AND_PIECEWISE", "bfloat16") as rig:
        _, stats = serve(rig, gpu_requests(MAX_LANES, max_tokens=40))
    decode = [use for use in stats.graph_uses if use.uniform_query_len == 1]
    assert sum(use.num_steps for use in decode) >= 30
    assert {use.run_mode for use in decode} == {"FULL"}
    assert {use.run_mode for use in stats.graph_uses} == {"FULL", "PIECEWISE"}


KINDS_OF_SAMPLING = ({}, {"temperature": 0.9, "top_p": 0.9, "seed": 1}, {"logprobs": 5})


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE", "FULL"])
def test_nothing_is_allocated_or_compiled_once_a_worker_serves(mode: str) -> None:
    with started(mode, "bfloat16", num_blocks=None, utilization=0.5) as rig:
        before = torch.cuda.memory_stats()
        with compilations() as compiled:
            serve(rig, *[requests(**sampling) for sampling in KINDS_OF_SAMPLING])
        after = torch.cuda.memory_stats()
    counters = ("num_device_alloc", "num_alloc_retries")
    grown = {name: after[name] - before[name] for name in counters}
    assert (compiled, grown) == ([], dict.fromkeys(counters, 0))


@pytest.fixture(scope="module", params=["PIECEWISE", "FULL"])
def rig(request: pytest.FixtureRequest) -> Iterator[GpuRig]:
    with started(request.param) as made:
        yield made


def prefilled(rig: GpuRig, size: int, *, eager: bool = False) -> tuple[bytes, torch.Tensor]:
    """(token ids, logits) of five prompts in one step, which then leave again."""
    mode = RunMode.EAGER if eager else max(RAN[rig.worker.config.graph.mode])
    result = rig.prefill(5, mode=mode, size=None if eager else size)
    logits = rig.parts.state.logits[:5].clone()
    rig.run(ReplicaPlan(0, leaves=list(range(5))), RunMode.EAGER, None)
    assert result.counts.count(1) == 5
    return result.token_ids, logits


def test_prompts_replayed_in_the_order_x_y_x_are_eager(rig: GpuRig) -> None:
    wanted, wanted_logits = prefilled(rig, 48, eager=True)
    for size in (48, 128, 48):
        tokens, logits = prefilled(rig, size)
        assert tokens == wanted
        torch.testing.assert_close(logits, wanted_logits, rtol=0, atol=1e-3)


def test_a_prompt_is_not_disturbed_by_nan_in_dead_slots(rig: GpuRig) -> None:
    clean, clean_logits = prefilled(rig, 128)
    rig.kv.storage[: rig.kv.num_blocks].fill_(float("nan"))
    tokens, logits = prefilled(rig, 128)
    rig.kv.storage[: rig.kv.num_blocks].zero_()
    assert tokens == clean and torch.equal(logits, clean_logits)


def test_a_padded_prompt_touches_only_the_scheduled_slots(rig: GpuRig) -> None:
    storage = rig.kv.storage[: rig.kv.num_blocks]
    storage.zero_()
    prefilled(rig, 128)
    written = (storage != 0).flatten(4).any(-1).any(1).any(1)
    assert torch.equal(written[1:], rig.live_slots()[1:])
    storage.zero_()
