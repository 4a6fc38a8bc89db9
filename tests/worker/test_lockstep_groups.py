"""Replicas that take every step together: one plan, dummies, prefills aligned within bounds."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_worker import Rig

from lockstep.comm.messages import StepPlan
from lockstep.parallel.agreement import agree, propose
from lockstep.worker.config import GraphConfig, ScheduleConfig
from lockstep.worker.graphs.dispatch import create_dispatcher
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.schedule.policy import PrefillAlignment


def prefills(plan: StepPlan) -> list[bool]:
    return [bool(replica.chunks) for replica in plan.replicas]


def test_one_plan_for_all_and_a_dummy_for_the_idle() -> None:
    rig = Rig(dp_size=3, lockstep="always")
    assert rig.scheduler.num_groups == 1
    rig.add("only", [1, 2, 3], 5)
    rig.run()
    rig.check_outputs()
    assert [replica.num_steps for replica in rig.replicas] == [5, 5, 5]
    first, *rest = rig.plans
    assert (first.agreement.run_mode, first.agreement.num_tokens_padded) == (RunMode.PIECEWISE, 4)
    assert first.agreement.num_tokens_across_dp == [3, 1, 1]
    for plan in rest:
        assert (plan.agreement.run_mode, plan.agreement.num_tokens_padded) == (RunMode.FULL, 1)
        assert [replica.num_lanes for replica in plan.replicas] == [1, 0, 0]


@pytest.mark.parametrize("lockstep", ["auto", "never"])
def test_groups_of_one_step_on_their_own(lockstep: str) -> None:
    rig = Rig(dp_size=2, lockstep=lockstep, run_ahead=1)
    assert rig.scheduler.num_groups == 2
    for index in range(4):
        rig.add(f"r{index}", [index], 6)
    while rig.scheduler.has_work() and any(rig.results[1] or [rig.plan(1)]):
        while rig.results[1]:
            rig.commit(1)
    assert rig.replicas[0].num_steps == 0
    assert rig.replicas[1].num_steps == 6
    rig.run()
    rig.check_outputs()


def test_results_of_a_step_may_come_replica_by_replica() -> None:
    rig = Rig(dp_size=2, lockstep="always", run_ahead=2)
    for index in range(2):
        rig.add(f"r{index}", [index], 6)
    rig.plan()
    rig.plan()
    assert rig.plan() is None
    assert len(rig.commit(1)) == 1 and len(rig.commit(1)) == 1
    assert rig.plan() is None
    assert rig.scheduler.oldest_step(0).missing_dp_ranks() == [0]
    rig.commit(0)
    assert rig.plan() is not None
    rig.run()
    rig.check_outputs()


def test_agreement_of_every_plan_is_that_of_its_batches() -> None:
    rig, rng = Rig(dp_size=3, lockstep="always"), random.Random(5)
    for index in range(30):
        rig.add(f"r{index}", [1] * rng.randint(1, 30), rng.randint(1, 20))
    rig.run()
    schedule = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64)
    dispatch = create_dispatcher(GraphConfig(), schedule).dispatch
    for plan in rig.plans:
        proposals = [propose(replica, max_mode=RunMode.FULL) for replica in plan.replicas]
        assert plan.agreement == agree(proposals, dispatch)
    modes = {plan.agreement.run_mode for plan in rig.plans}
    assert modes == {RunMode.PIECEWISE, RunMode.FULL}


def test_idle_replicas_do_not_make_a_prefill_wait() -> None:
    rig = Rig(dp_size=2, lockstep="always")
    rig.add("a", [1], 4)
    plan = rig.plan()
    assert plan is not None and prefills(plan) == [True, False]


def test_a_prefill_waits_for_company_but_not_longer_than_allowed() -> None:
    for limit in (0, 3, 8):
        rig = Rig(dp_size=2, lockstep="always", max_prefill_defer_steps=limit, run_ahead=1)
        rig.add("a", [1], 40)
        rig.plan()
        rig.commit(0)
        rig.commit(1)
        rig.add("b", [2], 4)
        waited = 0
        while not prefills(rig.plan())[1]:
            waited += 1
            rig.commit(0)
            rig.commit(1)
        assert waited == limit
        assert rig.plans[-1].replicas[0].num_lanes == 1, "the other replica goes on decoding"
        rig.run()
        rig.check_outputs()


def test_prefills_are_lined_up() -> None:
    rig = Rig(dp_size=2, lockstep="always", max_prefill_defer_steps=8, run_ahead=1)
    for req_id in ("a", "b"):
        rig.add(req_id, [1], 40)
    rig.plan()
    rig.add("c", [2], 4)
    for _ in range(3):
        rig.commit(0)
        rig.commit(1)
        assert prefills(rig.plan()) == [False, False]
    rig.add("d", [3], 4)
    rig.commit(0)
    rig.commit(1)
    assert prefills(rig.plan()) == [True, True]
    rig.run()
    rig.check_outputs()


@settings(max_examples=60)
@given(
    dp_size=st.integers(2, 4),
    limit=st.integers(0, 8),
    run_ahead=st.integers(0, 2),
    num_blocks=st.sampled_from([20, 200]),
    arrivals=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 25), st.integers(1, 20)), max_size=25
    ),
)
def test_neither_a_prefill_nor_a_decode_waits_longer(
    dp_size: int, limit: int, run_ahead: int, num_blocks: int, arrivals: list
) -> None:
    """An admissible prompt starts within ``limit`` steps; lanes that can decode always do."""
    rig = Rig(
        dp_size=dp_size, lockstep="always", max_prefill_defer_steps=limit, run_ahead=run_ahead,
        num_blocks=num_blocks, max_num_seqs=40, max_num_batched_tokens=2000,
    )  # fmt: skip
    pending = sorted(arrivals)
    added_at: dict[str, int] = {}
    for turn in range(3000):
        while pending and pending[0][0] <= turn:
            _, length, outputs = pending.pop(0)
            name = f"r{len(added_at)}"
            rig.add(name, [len(added_at)] * length, outputs)
            added_at[name] = len(rig.plans)
        planned = rig.plan()
        if planned is None:
            if not any(rig.results) and not pending:
                break
            for rank in range(dp_size):
                while rig.results[rank]:
                    rig.commit(rank)
    rig.check_outputs()
    assert len(rig.reasons()) == len(added_at)
    for number, plan in enumerate(rig.plans):
        for replica in plan.replicas:
            assert not replica.idle_lanes, "the token limit never binds here"
            for join in replica.joins:
                if num_blocks == 200 and not join.num_output_tokens:
                    assert number - added_at[join.req_id] <= limit


def test_alignment_counts_from_the_first_wish() -> None:
    alignment = PrefillAlignment(2)
    wish, decode, none = [True, False], [False, True], [False, False]
    assert [alignment.allow(wish, none, decode) for _ in range(4)] == [False, False, True, False]
    assert alignment.allow(wish, wish, decode), "a prompt that began goes on"
    assert not alignment.allow(wish, none, decode)
    assert alignment.allow(none, none, decode)
    assert alignment.allow([True, True], none, [True, True])
    assert alignment.allow(wish, none, none), "nobody decodes who could be dragged"
