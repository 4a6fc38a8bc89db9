"""Capture between the steps of live requests: their lanes, their tokens, their order over ranks."""

import logging
from collections.abc import Iterator

import msgspec
import pytest
import torch
from inline import SPEC, Served, alone_topology, make_scheduler, request, run_turns, worker_config
from lockstep_ranks import serve_and_capture, serve_on_ranks
from ranks import Rank, rank_outcomes, run_ranks
from rig import chunk, eager, full, join, make_rig, tokens_of

from lockstep.comm.errors import PeerLost
from lockstep.comm.messages import AddRequest, ReplicaPlan, StepAgreement, StepPlan
from lockstep.comm.sampling import SamplingParams
from lockstep.parallel.agreement import NO_STEP
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.dispatch import BatchDescriptor
from lockstep.worker.graphs.errors import CaptureFailed, GraphError
from lockstep.worker.graphs.manifest import Manifest, ManifestEntry
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker
from lockstep.worker.schedule import late_captures
from lockstep.worker.segments import Segments
from lockstep.worker.self_check import SelfCheck
from lockstep.worker.set_aside import lanes_set_aside

OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.4, "top_k": 30},
    "noise": {"temperature": 0.9, "seed": 5},
    "stops": {"temperature": 0.0, "min_tokens": 3},
}


@pytest.fixture(autouse=True)
def captures_follow_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_captures, "STEPS_BETWEEN", 2)


def adds(max_tokens: int = 14) -> list[AddRequest]:
    """More than there are lanes, so that lanes join, leave and move between captures."""
    return [
        request(
            f"{name} {i}", [(7 * i + 3 * j + 1) % 97 for j in range(1 + 3 * i)],
            stop_ids=[5, 6, 7] if name == "stops" else None,
            max_tokens=max_tokens - 2 * i, **sampling,
        )
        for i in range(3)
        for name, sampling in OPTIONS.items()
    ]  # fmt: skip


def served(config: WorkerConfig) -> tuple[dict[str, list[int]], list[StepPlan], Worker]:
    worker = Worker(config, SPEC, alone_topology())
    scheduler = make_scheduler(config, worker.start().num_blocks)
    plan, plans, answers = scheduler.plan, [], Served()

    def noted(group: int) -> StepPlan | None:
        planned = plan(group)
        plans.extend([planned] if planned else [])
        return planned

    scheduler.plan = noted
    for add in adds():
        scheduler.add(add)
    run_turns(worker, scheduler, answers)
    scheduler.check_conserved()
    return answers.tokens, plans, worker


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Tokens without any graph."""
    return served(worker_config(run_ahead=0))[0]


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE"])
def test_tokens_are_those_of_eager_capture_and_of_no_graphs(
    mode: str, run_ahead: int, expected: dict[str, list[int]]
) -> None:
    eager_tokens, _, whole = served(worker_config(graph_mode=mode, run_ahead=run_ahead))
    config = worker_config(graph_mode=mode, capture="lazy", run_ahead=run_ahead)
    lazy_tokens, plans, worker = served(config)
    assert lazy_tokens == eager_tokens == expected
    captures = [plan.capture for plan in plans if plan.capture is not None]
    num_early = len(worker._started.ready.graph_costs)
    assert len(captures) >= 2 and captures == [num_early + i for i in range(len(captures))]
    sizes = [cost.num_tokens for cost in worker._started.bench.graph_runner.costs()]
    known = {cost.num_tokens for cost in whole._started.bench.graph_runner.costs()}
    assert len(sizes) == num_early + len(captures) and set(sizes) <= known
    for each in (whole, worker):
        each.close()


def live_rig():
    """Three lanes in the middle of their answers, with history, noise and stop ids."""
    rig = make_rig()
    late = [BatchDescriptor(n, n, 1) for n in (6, 4, 3)]
    entries = tuple(ManifestEntry(RunMode.FULL, each) for each in late)
    rig.parts.graphs.capture(Manifest(entries, num_late=2))
    rig.runner.clear()
    sampling = [SamplingParams(max_tokens=64, **options) for options in OPTIONS.values()]
    blocks = [[1, 2, 3, 4], [39, 38, 37, 36], [10, 20, 30, 5], [11, 12, 13, 14]]
    joins = [
        join(lane, blocks[lane], num_prompt=lane + 2, sampling=each, stop_ids=[1])
        for lane, each in enumerate(sampling)
    ]
    chunks = [chunk(lane, [9, 8, 7, 6, 5][: lane + 2]) for lane in range(4)]
    rig.run(eager(0, ReplicaPlan(4, joins=joins, chunks=chunks)))
    return rig


def everything(rig) -> dict[str, torch.Tensor]:
    """All that live lanes own: logits are made anew by every step, block 0 is nobody's."""
    statics = rig.state.statics() | rig.sampling.statics() | {"kv": rig.kv.storage[1:]}
    history = [lane for lane in range(6) if rig.sampling.mirror(lane).keeps_history]
    statics["sampling_history"] = statics["sampling_history"][history]
    return {name: value.clone() for name, value in statics.items() if name != "logits"}


def test_capture_and_check_leave_live_lanes_bit_for_bit_as_they_were() -> None:
    rig, oracle = live_rig(), live_rig()
    for step_id in range(1, 7):
        if step_id in (2, 4):
            before = everything(rig)
            assert (before["sampling_history"] != 0).any()
            mirrors = [rig.sampling.mirror(lane) for lane in range(6)]
            with lanes_set_aside(rig.state, rig.sampling):
                assert not rig.state.active.any() and not rig.state.block_table.any()
                descriptor = rig.parts.graphs.capture_next(step_id // 2)
                SelfCheck(rig.parts).check(descriptor, rig.model.config.vocab_size)
            after = everything(rig)
            assert [name for name in before if not torch.equal(before[name], after[name])] == []
            assert [rig.sampling.mirror(lane) for lane in range(6)] == mirrors
        size = 6 if step_id < 3 else 4
        token_ids = tokens_of(rig.run(full(step_id, ReplicaPlan(4), size)))
        assert token_ids == tokens_of(oracle.run(full(step_id, ReplicaPlan(4), 6)))


def order(step_id: int, position: int) -> StepPlan:
    return StepPlan(
        0, step_id, StepAgreement(NO_STEP, 0, [0], 1), [ReplicaPlan(0)], capture=position
    )


@pytest.fixture(scope="module")
def lazy_worker() -> Iterator[Worker]:
    config = worker_config(graph_mode="FULL_DECODE_ONLY", capture="lazy")
    worker = Worker(config, SPEC, alone_topology())
    worker.start()
    yield worker
    worker.close()


def test_only_the_next_graph_of_the_manifest_can_be_ordered(
    lazy_worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lockstep")
    runner = lazy_worker._started.bench.graph_runner
    assert len(runner.costs()) == 2
    for step_id, position in enumerate((0, 1, 3, 4, 9)):
        with pytest.raises(GraphError, match=f"graph {position} is not captured: 2 of 4 exist"):
            lazy_worker.execute(order(step_id, position))
    [result] = lazy_worker.execute(order(5, 2))
    assert result.captured == runner.costs()[-1] and result.captured.num_tokens == 2
    assert (result.counts, result.token_ids, result.step_id) == (b"", b"", 5)
    assert "captured while serving" not in caplog.text
    lazy_worker.execute(order(6, 3))
    assert "the 2 graphs captured while serving took 0.0 MiB of 0.0 left free" in caplog.text
    with pytest.raises(GraphError, match="graph 4 is not captured: the manifest has 4"):
        lazy_worker.execute(order(7, 4))


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp_size=2, verify_agreement=True, timeout_s=20),
        ParallelConfig(dp_size=2, dp_lockstep="always", verify_agreement=True, timeout_s=20),
    ],
    ids=["tp", "dp lockstep"],
)
def test_all_ranks_capture_alike_and_give_the_tokens_of_one(
    parallel: ParallelConfig, expected: dict[str, list[int]]
) -> None:
    config = worker_config(parallel=parallel, graph_mode="FULL_AND_PIECEWISE", capture="lazy")
    outcomes = run_ranks(serve_and_capture, 2, msgspec.msgpack.encode(config), adds(), gloo=False)
    (tokens, ordered, costs), other = outcomes
    assert (tokens, ordered) == other[:2] and tokens == expected
    sizes = [(cost.num_tokens, cost.uniform_query_len) for cost in costs]
    assert sizes == [(cost.num_tokens, cost.uniform_query_len) for cost in other[2]]
    assert len(ordered) == len(sizes) >= 4


def fail_late_on_rank_1(rank: Rank, config_bytes: bytes, requests: list[AddRequest]) -> None:
    late_captures.STEPS_BETWEEN = 2
    parts = Segments.parts

    def failing(segments: Segments, num_tokens: int):
        if rank.rank == 1 and num_tokens == 4:
            return {"segment 0": lambda: segments.flow.hidden.nonexistent}
        return parts(segments, num_tokens)

    Segments.parts = failing
    serve_on_ranks(rank, config_bytes, requests)


def test_a_rank_that_fails_in_a_late_capture_ends_all_with_its_traceback() -> None:
    parallel = ParallelConfig(tp_size=2, timeout_s=20)
    config = worker_config(parallel=parallel, graph_mode="PIECEWISE", capture="lazy")
    waiting, failing = rank_outcomes(
        fail_late_on_rank_1, 2, msgspec.msgpack.encode(config), adds(), gloo=False
    )
    assert isinstance(failing.error, CaptureFailed), failing
    assert "at size 4 in segments: AttributeError" in str(failing.error)
    assert "segments.flow.hidden.nonexistent" in failing.traceback
    assert isinstance(waiting.error, PeerLost) and waiting.error.global_rank == 1
    assert "gave up (AttributeError" in str(waiting.error)
