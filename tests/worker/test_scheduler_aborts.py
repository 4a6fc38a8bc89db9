"""Aborts at any time: blocks come back, nothing is left, nobody else notices."""

import random

from sim_worker import Rig


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
        rig.check_outputs(of={"next"})


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
