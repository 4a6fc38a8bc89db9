"""Kinds of fault that serving systems report, each made impossible or a clear error."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_worker import VOCAB, Rig, expected_outputs, make_add, make_scheduler

from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import AddRequest, StepResult, pack_ids, unpack_ids
from lockstep.comm.sampling import SamplingParams
from lockstep.worker.schedule.checks import QueueFull
from lockstep.worker.schedule.policy import MAX_PASSED, RESERVE_AFTER


def outputs_are_right(rig: Rig, *, of: set[str] | None = None) -> None:
    outputs = rig.outputs()
    for req_id, add in rig.adds.items():
        if of is None or req_id in of:
            assert outputs[req_id] == expected_outputs(add, add.sampling.max_tokens), req_id


# --- what is refused, before any state is made ---


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ([], {}, r"prompt_ids must hold 1 to 63 tokens \(max_model_len 64.*got 0"),
        ([1] * 64, {}, "prompt_ids must hold 1 to 63 tokens.*got 64"),
        ([1] * 640, {}, "prompt_ids must hold 1 to 63 tokens.*got 640"),
        ([1, VOCAB], {}, r"prompt_ids must be in \[0, 97\), got 97"),
        ([-1], {}, r"prompt_ids must be in \[0, 97\), got -1"),
        ([1], {"stops": (2, 2**31 - 1)}, r"stop_ids must be in \[0, 97\), got 2147483647"),
        ([1], {"stop_token_ids": (97,)}, r"stop_token_ids must be in \[0, 97\), got 97"),
        ([1], {"logit_bias": {97: 1.0}}, r"logit_bias must be in \[0, 97\), got 97"),
        ([1] * 30, {"max_tokens": 20}, r"9 KV blocks of 4 tokens, got 30 \+ 20 tokens = 13 blocks"),
    ],
)
def test_bad_request_is_refused_and_harms_nobody(prompt, more: dict, message: str) -> None:
    rig = Rig(num_blocks=10)
    with pytest.raises(ValueError, match=message):
        rig.scheduler.add(make_add("bad", prompt, **more))
    assert not rig.scheduler.has_work()
    for index in range(20):
        rig.add(f"r{index}", [index], 4)
    rig.run()
    outputs_are_right(rig)


def test_longest_prompt_is_served_and_ends_at_max_model_len() -> None:
    rig = Rig()
    rig.add("a", [1] * 63, None)
    rig.add("b", [2] * 60, None)
    rig.run()
    assert {req_id: len(out) for req_id, out in rig.outputs().items()} == {"a": 1, "b": 4}
    assert set(rig.reasons().values()) == {"length"}


def test_without_max_tokens_a_small_pool_bounds_the_output() -> None:
    rig = Rig(num_blocks=6)
    rig.add("a", [1] * 7, None)
    rig.run()
    assert len(rig.outputs()["a"]) == 5 * 4 - 7 + 1


def test_a_live_id_is_refused_and_can_be_used_again() -> None:
    rig = Rig()
    rig.add("a", [1], 4)
    with pytest.raises(ValueError, match="req_id must not be in use, got 'a' twice"):
        rig.scheduler.add(make_add("a", [2]))
    with pytest.raises(ValueError, match="req_id must not be empty"):
        rig.scheduler.add(make_add("", [2]))
    rig.run()
    outputs_are_right(rig)
    rig.deltas.clear()
    rig.add("a", [3], 5)
    rig.run()
    outputs_are_right(rig)


def test_queue_is_bounded_when_asked() -> None:
    rig, refused = Rig(max_queued_requests=4), 0
    for index in range(50):
        try:
            rig.add(f"r{index}", [index], 3)
        except QueueFull as error:
            assert "max_queued_requests must be at most 4" in str(error)
            refused += 1
    assert refused == 46
    rig.run()
    outputs_are_right(rig)


# --- aborts ---


def test_abort_at_every_state_frees_the_blocks() -> None:
    def busy() -> int:
        (replica,) = rig.scheduler.stats().replicas
        return replica.num_blocks - replica.num_free_blocks - replica.num_cached_blocks

    for steps in range(8):
        rig = Rig(max_num_seqs=2, max_num_batched_tokens=6, run_ahead=2)
        for req_id, length in (("long", 20), ("b", 3), ("queued", 5)):
            rig.add(req_id, list(range(length)), 9)
        for _ in range(steps):
            rig.plan()
            if len(rig.results[0]) == 2:
                rig.commit()
        for req_id in ("long", "b", "queued"):
            rig.scheduler.abort(req_id)
        assert busy() == 0
        rig.run()
        assert all(reason in ("abort", "length") for reason in rig.reasons().values())
        rig.add("next", [1, 2, 3], 9)
        rig.run()
        outputs_are_right(rig, of={"next"})


def test_aborts_at_random_times_leave_nothing_behind() -> None:
    rng = random.Random(3)
    rig = Rig(num_blocks=40, run_ahead=2)
    for round_number in range(20):
        names = [f"{round_number}/{index}" for index in range(20)]
        for name in names:
            rig.add(name, [rng.randrange(90) for _ in range(rng.randint(1, 20))], 12)
        while names:
            rig.plan()
            if rig.results[0] and rng.random() < 0.7:
                rig.commit()
            if rng.random() < 0.6:
                rig.scheduler.abort(names.pop(rng.randrange(len(names))))
    rig.run()
    (replica,) = rig.scheduler.stats().replicas
    assert replica.num_running == replica.num_waiting == 0
    assert replica.num_free_blocks + replica.num_cached_blocks == replica.num_blocks
    assert len(rig.reasons()) == len(rig.adds)


def test_abort_of_an_unknown_or_finished_request_is_only_counted() -> None:
    rig = Rig()
    rig.add("a", [1], 2)
    rig.run()
    rig.scheduler.abort("a")
    rig.scheduler.abort("never")
    assert rig.scheduler.take_deltas() == []
    assert rig.scheduler.stats().num_unknown_aborts == 2


def test_leave_comes_with_the_first_plan_after_the_abort() -> None:
    rig = Rig(run_ahead=2)
    for req_id in ("a", "b"):
        rig.add(req_id, [1, 2], 30)
    rig.plan()
    rig.plan()
    rig.scheduler.abort("a")
    assert rig.plan() is None
    rig.commit()
    plan = rig.plan()
    assert plan is not None
    assert (plan.replicas[0].leaves, plan.replicas[0].moves) == ([0], [(1, 0)])


# --- results that do not fit ---


def test_results_of_another_epoch_or_step_are_dropped_and_counted() -> None:
    rig = Rig()
    rig.add("a", [1], 4)
    rig.plan()
    (result,) = rig.results[0]
    for epoch, step_id, tp_rank in ((1, 0, 0), (0, 7, 0), (0, 0, 1)):
        other = StepResult(epoch, step_id, 0, tp_rank, result.counts, result.token_ids)
        assert rig.scheduler.commit(other) == []
    rig.commit()
    assert rig.scheduler.commit(result) == []
    assert rig.scheduler.stats().num_dropped_results == 4
    rig.run()
    outputs_are_right(rig)


def test_results_that_do_not_match_the_plan_name_the_rank() -> None:
    def first_result() -> tuple[Rig, StepResult]:
        rig = Rig(run_ahead=2)
        rig.add("a", [1], 4)
        rig.plan()
        return rig, rig.results[0][0]

    rig, _ = first_result()
    with pytest.raises(RankMismatch, match="dp_rank 0 tp_rank 0 step 0 gave 2 counts"):
        rig.scheduler.commit(StepResult(0, 0, 0, 0, pack_ids([1, 1]), pack_ids([1, 1])))
    rig, _ = first_result()
    with pytest.raises(RankMismatch, match=r"gave nothing, but had to sample, in lane 0 \(a\)"):
        rig.scheduler.commit(StepResult(0, 0, 0, 0, pack_ids([0]), pack_ids([0])))
    rig = Rig(max_num_batched_tokens=2)
    rig.add("a", [1, 2, 3], 4)
    rig.plan()
    with pytest.raises(RankMismatch, match=r"gave a token it had not to sample in lane 0 \(a\)"):
        rig.scheduler.commit(StepResult(0, 0, 0, 0, pack_ids([1]), pack_ids([1])))
    rig, _ = first_result()
    rig.plan()
    with pytest.raises(RankMismatch, match="answered step 1 before step 0"):
        rig.scheduler.commit(rig.results[0][1])


def test_nan_ends_only_its_request() -> None:
    rig = Rig()
    for index in range(4):
        rig.add(f"r{index}", [1, 2, 3, 4, 5, 6, 7, 8, index], 8)
    rig.replicas[0].bad_requests = {"r2"}
    rig.run()
    assert Counter(rig.reasons().values()) == {"length": 3, "error": 1}
    (error,) = [delta.error for delta in rig.deltas if delta.error]
    assert error == "output token 0: the logits are not finite"
    outputs_are_right(rig, of={"r0", "r1", "r3"})
    assert rig.scheduler.stats().num_finished == {"length": 3, "error": 1}


def test_blocks_of_a_nan_request_are_not_found_again() -> None:
    rig = Rig(max_num_batched_tokens=4)
    rig.replicas[0].bad_requests = {"bad"}
    rig.add("bad", [5] * 12, 4)
    rig.run()
    rig.add("good", [5] * 12, 4)
    rig.run()
    assert rig.scheduler.stats().replicas[0].num_cached_tokens == 0
    outputs_are_right(rig, of={"good"})


def test_token_outside_the_vocabulary_ends_the_request() -> None:
    rig = Rig()
    rig.add("a", [1], 4)
    rig.plan()
    deltas = rig.scheduler.commit(StepResult(0, 0, 0, 0, pack_ids([1]), pack_ids([VOCAB])))
    assert deltas[0].error == "output token 0: sampled token id 97 is not in [0, 97)"
    assert not rig.scheduler.has_work()


def test_fail_all_ends_every_request_once() -> None:
    rig = Rig(max_num_seqs=2)
    for index in range(5):
        rig.add(f"r{index}", [index], 9)
    rig.plan()
    rig.scheduler.fail_all("rank 1 is lost")
    deltas = rig.scheduler.take_deltas()
    assert {delta.req_id for delta in deltas} == set(rig.adds)
    assert {(delta.finish_reason, delta.error) for delta in deltas} == {("error", "rank 1 is lost")}
    assert not rig.scheduler.has_work()
    rig.scheduler.check_conserved()


# --- preemption, fairness, progress ---


def test_preempted_requests_resume_token_exactly() -> None:
    rig, roomy = Rig(num_blocks=15, caching=False), Rig(num_blocks=500, caching=False)
    for each in (rig, roomy):
        for index in range(6):
            each.add(f"r{index}", [index] * 3, 30, seed=index, presence_penalty=0.5)
        each.run()
        outputs_are_right(each)
    assert rig.outputs() == roomy.outputs()
    (tight,), (wide,) = rig.scheduler.stats().replicas, roomy.scheduler.stats().replicas
    assert tight.num_preemptions >= 3 and tight.num_recomputed_tokens > 0
    assert wide.num_preemptions == wide.num_recomputed_tokens == 0
    resumed = [join for plan in rig.plans for join in plan.replicas[0].joins]
    assert any(join.num_output_tokens for join in resumed)


def test_nobody_is_admitted_into_blocks_just_taken_from_another() -> None:
    rig = Rig(num_blocks=15, caching=False, run_ahead=0, max_num_seqs=4)
    for index in range(4):
        rig.add(f"r{index}", [index] * 3, 30)
    for index in range(20):
        rig.add(f"small{index}", [index], 2)
    before = 0
    while rig.scheduler.has_work():
        plan = rig.plan()
        after = rig.scheduler.stats().replicas[0].num_preemptions
        assert plan is None or after == before or not plan.replicas[0].joins
        before = after
        if rig.results[0]:
            rig.commit()
    assert before > 0


def test_a_request_that_others_outgrow_is_not_preempted_again_and_again() -> None:
    """These lengths preempt one of them eight times where no reserve is kept."""
    lengths = [6, 7, 7, 3, 2, 5, 1, 8, 3, 5, 5, 2]
    outputs = [38, 23, 27, 35, 34, 21, 37, 24, 32, 28, 13, 36]
    rig = Rig(num_blocks=22, caching=False, run_ahead=0, max_num_seqs=12)
    for index, (length, count) in enumerate(zip(lengths, outputs, strict=True)):
        rig.add(f"r{index}", [index] * length, count)
    rig.run()
    outputs_are_right(rig)
    joins = Counter(join.req_id for plan in rig.plans for join in plan.replicas[0].joins)
    assert max(joins.values()) == 1 + RESERVE_AFTER


def test_nobody_is_preempted_to_run_ahead() -> None:
    for run_ahead in (0, 2):
        rig = Rig(num_blocks=9, run_ahead=run_ahead, max_num_seqs=2)
        for req_id in ("a", "b"):
            rig.add(req_id, [1, 2, 3], 14, seed=run_ahead)
        rig.run()
        assert rig.scheduler.stats().replicas[0].num_preemptions == 0
        outputs_are_right(rig)


def test_full_pool_waits_for_the_steps_in_flight() -> None:
    rig = Rig(num_blocks=4, block_size=2, run_ahead=3, caching=False)
    rig.add("a", [1], 5)
    rig.add("b", [2], 5)
    while rig.plan() is not None:
        pass
    assert len(rig.results[0]) < 3
    assert rig.scheduler.stats().replicas[0].num_preemptions == 0
    rig.run()
    outputs_are_right(rig)


def test_small_requests_pass_a_big_one_which_still_gets_its_turn() -> None:
    rig = Rig(num_blocks=18, max_num_seqs=4, caching=False, run_ahead=0)
    rig.add("first", [1] * 9, 12)
    rig.plan()
    rig.add("big", [2] * 60, 4)
    for index in range(200):
        rig.add(f"small{index}", [index % 90] * 5, 2 + (7 * index) % 5)
    started = {}
    while rig.scheduler.has_work():
        plan = rig.plan()
        for join in plan.replicas[0].joins if plan else ():
            started[join.req_id] = plan.step_id
        if rig.results[0]:
            rig.commit()
    passed = sum(step < started["big"] for step in started.values()) - 1
    assert 5 < passed <= MAX_PASSED + 1
    assert started["small5"] <= 8
    outputs_are_right(rig)


def test_least_computed_victim_saves_work() -> None:
    recomputed = {}
    for preempt in ("youngest", "least_computed"):
        rig = Rig(num_blocks=15, caching=False, preempt=preempt, run_ahead=0)
        for index, (length, outputs) in enumerate([(4, 24), (30, 16)]):
            rig.add(f"r{index}", [index] * length, outputs)
        rig.run()
        outputs_are_right(rig)
        recomputed[preempt] = rig.scheduler.stats().replicas[0].num_recomputed_tokens
    assert 0 < recomputed["least_computed"] < recomputed["youngest"]


@settings(max_examples=100, deadline=None)
@given(
    num_blocks=st.integers(3, 41),
    run_ahead=st.integers(0, 3),
    caching=st.booleans(),
    preempt=st.sampled_from(["youngest", "least_computed"]),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 23)), min_size=1, max_size=30),
    seed=st.integers(0, 99),
)
def test_any_small_pool_finishes_or_refuses_with_few_preemptions(
    num_blocks: int, run_ahead: int, caching: bool, preempt: str, shapes, seed: int
) -> None:
    rig = Rig(num_blocks=num_blocks, run_ahead=run_ahead, caching=caching, preempt=preempt)
    rng = random.Random(seed)
    for index, (length, max_tokens) in enumerate(shapes):
        prompt = [rng.randrange(3) for _ in range(length)]
        try:
            rig.add(f"r{index}", prompt, max_tokens, seed=index)
        except ValueError as error:
            assert f"{num_blocks - 1} KV blocks of 4 tokens" in str(error)
    rig.run(max_steps=4000)
    outputs_are_right(rig)
    joins = Counter(join.req_id for plan in rig.plans for join in plan.replicas[0].joins)
    assert all(count <= 1 + RESERVE_AFTER for count in joins.values()), joins


# --- replicas ---


def test_burst_is_shared_out_evenly_and_credited_back() -> None:
    scheduler = make_scheduler(dp_size=4)
    for index in range(400):
        scheduler.add(make_add(f"r{index}", [1, 2, 3], 5))
    placed = [replica.num_waiting for replica in scheduler.stats().replicas]
    assert all(abs(each - 100) <= 2 for each in placed)
    for index in range(0, 400, 2):
        scheduler.abort(f"r{index}")
    balancer = scheduler._balancer
    assert sum(balancer.requests) == 200
    for index in range(1, 400, 2):
        scheduler.abort(f"r{index}")
    assert balancer.requests == balancer.tokens == [0] * 4


def test_long_prompts_are_balanced_by_tokens_and_ties_rotate() -> None:
    scheduler, rng = (
        make_scheduler(dp_size=4, max_model_len=4000, num_blocks=2000),
        random.Random(0),
    )
    for index in range(200):
        scheduler.add(make_add(f"r{index}", [1] * rng.choice([10, 10, 10, 3000]), 8))
    tokens = scheduler._balancer.tokens
    assert max(tokens) - min(tokens) < 0.2 * max(tokens)
    scheduler = make_scheduler(dp_size=3)
    firsts = []
    for index in range(6):
        scheduler.add(make_add(f"r{index}", [1], 1))
        waiting = [replica.num_waiting for replica in scheduler.stats().replicas]
        firsts.append(waiting.index(1))
        scheduler.abort(f"r{index}")
    assert firsts == [0, 1, 2, 0, 1, 2]


# --- details that users see ---


def test_seeds_of_unseeded_requests() -> None:
    def seeds(base: int | None) -> list[int]:
        rig = Rig(seed=base)
        for index in range(3):
            rig.add(f"r{index}", [1], 1, seed=None)
        return [join.seed for join in rig.plan().replicas[0].joins]

    assert len({*seeds(None), *seeds(None)}) == 6
    assert seeds(5) == seeds(5) != seeds(6)
    assert len(set(seeds(5))) == 3
    assert all(0 <= seed < 2**63 for seed in seeds(None))


def test_cached_tokens_are_reported_and_salt_and_history_keep_apart() -> None:
    rig, prompt = Rig(), list(range(13))
    rig.add("cold", prompt, 2)
    rig.run()
    for req_id, more in [
        ("warm", {}),
        ("salted", {"salt": "tenant"}),
        ("history", {"repetition_penalty": 1.2}),
    ]:
        rig.deltas.clear()
        rig.add(req_id, prompt, 2, **more)
        rig.run()
        cached = {delta.num_cached_tokens for delta in rig.deltas}
        assert cached == {12 if req_id == "warm" else 0}, req_id
    outputs_are_right(rig, of={"history"})
    assert rig.scheduler.stats().replicas[0].num_cached_tokens == 12


def test_outputs_are_found_by_the_next_turn_of_a_conversation() -> None:
    rig, prompt = Rig(), list(range(6))
    rig.add("turn 1", prompt, 11)
    rig.run()
    history = prompt + rig.outputs()["turn 1"]
    rig.deltas.clear()
    rig.add("turn 2", [*history, 3], 2)
    rig.run()
    assert rig.deltas[0].num_cached_tokens >= 12


def test_prompts_are_chunked_under_the_token_limit_beside_decodes() -> None:
    rig = Rig(max_num_batched_tokens=5, max_num_seqs=3, run_ahead=0)
    rig.add("short", [1], 12)
    rig.plan()
    rig.add("long", list(range(14)), 2)
    rig.run()
    for plan in rig.plans:
        (replica,) = plan.replicas
        chunks = [len(unpack_ids(chunk.token_ids)) for chunk in replica.chunks]
        assert sum(chunks) + replica.num_lanes - len(chunks) - len(replica.idle_lanes) <= 5
    assert [len(unpack_ids(c.token_ids)) for p in rig.plans for c in p.replicas[0].chunks] == [
        1, 4, 4, 4, 2,
    ]  # fmt: skip
    outputs_are_right(rig)


def test_more_requests_than_tokens_a_step_still_all_finish() -> None:
    rig = Rig(max_num_seqs=8, max_num_batched_tokens=3)
    for index in range(10):
        rig.add(f"r{index}", list(range(index + 1)), 6)
    rig.run()
    outputs_are_right(rig)
    assert max(plan.replicas[0].num_lanes for plan in rig.plans) == 3


def test_no_step_is_planned_beyond_the_last_output() -> None:
    for run_ahead in (0, 1, 2, 3):
        rig = Rig(run_ahead=run_ahead)
        rig.add("a", [1, 2], 5)
        rig.run()
        assert len(rig.plans) == 5
        assert rig.replicas[0].num_steps == 5


def test_steps_in_flight_are_bounded_by_run_ahead() -> None:
    for run_ahead, depth in ((0, 1), (1, 1), (2, 2), (3, 3)):
        rig = Rig(run_ahead=run_ahead)
        rig.add("a", [1, 2], 30)
        while rig.plan() is not None:
            pass
        assert len(rig.results[0]) == depth


def test_logprobs_pass_through_to_their_request() -> None:
    from lockstep.comm.messages import TokenLogprobs

    rig = Rig()
    for req_id in ("a", "b"):
        rig.add(req_id, [1], 1, logprobs=0)
    rig.plan()
    (result,) = rig.results[0]
    entry = TokenLogprobs(5, -0.5, 1, [], [])
    told = StepResult(0, 0, 0, 0, result.counts, result.token_ids, logprobs=[(1, entry)])
    deltas = rig.scheduler.commit(told)
    assert [delta.logprobs for delta in deltas] == [None, [entry]]


def test_stop_strings_do_not_travel_to_the_ranks() -> None:
    scheduler = make_scheduler()
    params = SamplingParams(stop=("x" * 9999,), max_tokens=1)
    scheduler.add(AddRequest("a", pack_ids([1]), params))
    plan = scheduler.plan(0)
    assert plan is not None and plan.replicas[0].joins[0].sampling.stop == ()
