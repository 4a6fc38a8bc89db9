"""Results that do not fit, and ends with an error, touch only their own request."""

from collections import Counter

import pytest
from sim_worker import VOCAB, Rig

from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import StepResult, pack_ids


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
    rig.check_outputs()


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
    rig.check_outputs(of={"r0", "r1", "r3"})
    stats = rig.scheduler.stats()
    assert stats.num_finished == {"length": 3, "error": 1} and stats.num_bad_lanes == 1


def test_blocks_of_a_nan_request_are_not_found_again() -> None:
    rig = Rig(max_num_batched_tokens=4)
    rig.replicas[0].bad_requests = {"bad"}
    rig.add("bad", [5] * 12, 4)
    rig.run()
    rig.add("good", [5] * 12, 4)
    rig.run()
    assert rig.scheduler.stats().replicas[0].num_cached_tokens == 0
    rig.check_outputs(of={"good"})


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
