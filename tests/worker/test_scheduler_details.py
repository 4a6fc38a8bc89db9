"""Seeds, cached tokens, chunks, run-ahead: what users see of the scheduler."""

from sim_worker import Rig, make_scheduler

from lockstep.comm.messages import AddRequest, StepResult, pack_ids, unpack_ids
from lockstep.comm.sampling import SamplingParams


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
    rig.check_outputs(of={"history"})
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
    rig.check_outputs()


def test_more_requests_than_tokens_a_step_still_all_finish() -> None:
    rig = Rig(max_num_seqs=8, max_num_batched_tokens=3)
    for index in range(10):
        rig.add(f"r{index}", list(range(index + 1)), 6)
    rig.run()
    rig.check_outputs()
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
