"""Graphs captured while serving, as the scheduler plans them: when, in which order, for whom."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_worker import Rig

from lockstep.comm.messages import StepPlan
from lockstep.worker.config import GraphConfig, ScheduleConfig
from lockstep.worker.graphs.dispatch import BatchDescriptor, Dispatcher, create_dispatcher
from lockstep.worker.graphs.grid import build_grid
from lockstep.worker.graphs.manifest import Manifest, build_manifest
from lockstep.worker.graphs.mode import GraphMode, RunMode
from lockstep.worker.schedule import late_captures

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 16}


def lazy_manifest(mode: str, **limits: int) -> Manifest:
    schedule = ScheduleConfig(**(LIMITS | limits))
    dispatcher = create_dispatcher(GraphConfig(mode=mode), schedule)
    return build_manifest(dispatcher, capture="lazy")


def lazy_rig(**config: object) -> Rig:
    return Rig(capture="lazy", mode="FULL_DECODE_ONLY", **config)


@pytest.mark.parametrize("mode", GraphMode)
def test_the_largest_of_every_kind_come_first_and_nothing_is_lost(mode: GraphMode) -> None:
    dispatcher = Dispatcher(build_grid(max_num_seqs=64, max_num_batched_tokens=512), mode)
    eager, lazy = build_manifest(dispatcher), build_manifest(dispatcher, capture="lazy")
    assert eager.num_late == 0 and set(eager.entries) == set(lazy.entries)
    late = lazy.entries[len(lazy.early) :]
    assert [entry for entry in eager.entries if entry not in lazy.early] == list(late)
    for kind in {(e.run_mode, e.descriptor.uniform_query_len) for e in eager.entries}:
        sizes = [
            e.descriptor.num_tokens
            for e in lazy.early
            if (e.run_mode, e.descriptor.uniform_query_len) == kind
        ]
        every = dispatcher.grid.decode_sizes if kind[1] else dispatcher.grid.capture_sizes
        assert sizes == sorted(every, reverse=True)[:2]
    if mode is not GraphMode.NONE:
        assert lazy.digest() != eager.digest()


@given(st.data())
def test_a_batch_takes_the_least_graph_that_exists_and_holds_it(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from([m for m in GraphMode if m is not GraphMode.NONE]))
    grid = build_grid(max_num_seqs=data.draw(st.integers(1, 80)), max_num_batched_tokens=160)
    whole = Dispatcher(grid, mode)
    descriptors = [e.descriptor for e in build_manifest(whole, capture="lazy").entries]
    some = data.draw(st.sets(st.sampled_from(descriptors)))
    part = whole.only(some)
    num_tokens = data.draw(st.integers(1, grid.max_num_seqs))
    query_len = data.draw(st.integers(0, 1))
    run_mode, found = part.dispatch(num_tokens, num_tokens, query_len)

    def serves(each: BatchDescriptor) -> bool:
        kind = each.uniform_query_len in (0, query_len) if query_len else not each.uniform_query_len
        reqs = each.num_reqs is None or each.num_reqs >= num_tokens
        return kind and reqs and each.num_tokens >= num_tokens

    fitting = [each for each in some if serves(each)]
    assert (run_mode is RunMode.EAGER) == (not fitting)
    if fitting:
        assert found in fitting
        same_kind = [e for e in fitting if e.uniform_query_len == found.uniform_query_len]
        assert found.num_tokens == min(e.num_tokens for e in same_kind)
    assert whole.only(descriptors).grid == grid


def assert_orders(plans: list[StepPlan], manifest: Manifest) -> None:
    """Captures in the manifest's order, and no step by a graph that does not exist yet."""
    exists = {entry.descriptor.num_tokens for entry in manifest.early}
    positions = [plan.capture for plan in plans if plan.capture is not None]
    first = len(manifest.early)
    assert positions == list(range(first, first + len(positions)))
    for plan in plans:
        if plan.capture is not None:
            exists.add(manifest.entries[plan.capture].descriptor.num_tokens)
        elif plan.agreement.run_mode == RunMode.FULL:
            most = max(plan.agreement.num_tokens_across_dp)
            least = min(size for size in exists if size >= most)
            assert plan.agreement.num_tokens_padded == least


@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=12),
    between=st.integers(0, 5),
    run_ahead=st.integers(0, 3),
    dp_size=st.integers(1, 2),
)
@settings(deadline=None, max_examples=60)
def test_any_traffic_keeps_its_tokens_and_captures_drained_and_in_order(
    requests: list[tuple[int, int]], between: int, run_ahead: int, dp_size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_captures, "STEPS_BETWEEN", between)
        rig = lazy_rig(dp_size=dp_size, lockstep="always", run_ahead=run_ahead)
        watch_that_captures_come_drained(rig)
        for index, (length, max_tokens) in enumerate(requests):
            rig.add(f"r{index}", [index] * length, max_tokens)
        rig.run()
    rig.check_outputs()
    capture_the_rest(rig)
    manifest = lazy_manifest("FULL_DECODE_ONLY")
    assert_orders(rig.plans, manifest)
    positions = list(range(len(manifest.early), len(manifest.entries)))
    assert [replica.captured for replica in rig.replicas] == [positions] * dp_size
    stats = rig.scheduler.stats()
    assert stats.num_late_graphs == manifest.num_late
    for replica in stats.replicas:
        assert [cost.num_tokens for cost in replica.late_graphs] == positions


def watch_that_captures_come_drained(rig: Rig) -> None:
    plan = rig.scheduler.plan

    def watched(group: int) -> StepPlan | None:
        oldest = rig.scheduler.oldest_step(group)
        planned = plan(group)
        assert planned is None or planned.capture is None or oldest is None
        return planned

    rig.scheduler.plan = watched


def capture_the_rest(rig: Rig, group: int = 0) -> None:
    """As a driver does that has nothing else to do."""
    plan = rig.scheduler.plan
    rig.scheduler.plan = rig.scheduler.plan_capture
    while rig.plan(group):
        for dp_rank in range(len(rig.replicas)):
            if rig.results[dp_rank]:
                assert rig.commit(dp_rank) == []
    rig.scheduler.plan = plan


def test_busy_groups_take_steps_between_captures_and_idle_ones_need_not() -> None:
    rig = lazy_rig(max_num_seqs=8, max_num_batched_tokens=8)
    rig.add("a", [1], 60)
    rig.run()
    captures = [plan.step_id for plan in rig.plans if plan.capture is not None]
    between = late_captures.STEPS_BETWEEN
    assert captures == [between, 2 * between + 1]
    num_plans = len(rig.plans)
    capture_the_rest(rig)
    assert len(rig.plans) == num_plans, "all were captured while it was busy"


def test_groups_of_their_own_capture_each_for_themselves() -> None:
    rig = lazy_rig(dp_size=2, lockstep="never")
    rig.add("a", [1], 40)
    rig.run()
    assert [bool(replica.captured) for replica in rig.replicas] == [True, False]
    assert rig.scheduler.plan(1) is None
    plan = rig.plan(1)
    assert plan is None
    capture_the_rest(rig, group=1)
    assert rig.replicas[1].captured == list(range(2, 4))


def test_no_capture_while_a_step_is_in_flight() -> None:
    rig = lazy_rig()
    rig.add("a", [1], 8)
    assert rig.plan() is not None
    assert rig.scheduler.plan_capture(0) is None
    rig.run()
    assert rig.scheduler.plan_capture(0).capture == 2
    assert rig.scheduler.plan_capture(0) is None, "one at a time"


def test_eager_capture_leaves_nothing_for_later() -> None:
    rig = Rig(mode="FULL_DECODE_ONLY")
    assert rig.scheduler.plan_capture(0) is None
    rig.add("a", [1], 60)
    rig.run()
    assert all(plan.capture is None for plan in rig.plans)


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_stream_sees_no_gap_but_the_capture_itself(run_ahead: int) -> None:
    rig = lazy_rig(run_ahead=run_ahead)
    rig.add("a", [1, 2], 58)
    deepest = max(1, run_ahead)
    while rig.scheduler.has_work():
        drained = not rig.results[0]
        plan = rig.plan()
        if plan is not None and plan.capture is not None:
            # Steps behind the capture are granted before it is done, as deep as ever.
            assert drained and [rig.plan() is not None for _ in range(deepest - 1)] == [True] * (
                deepest - 1
            )
        elif drained:
            assert plan is not None, "a rank waits for a plan"
        if rig.results[0]:
            rig.commit()
    assert rig.replicas[0].captured == [2, 3]
    rig.check_outputs()
