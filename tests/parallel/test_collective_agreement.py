"""The same agreement over a host gather: equal on all ranks, and differences name the rank."""

import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from proposals import batches, dispatcher, proposal
from ranks import Rank, join, run_ranks

from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import StepAgreement
from lockstep.parallel.agreement import Proposal, agree
from lockstep.parallel.collective_agreement import CollectiveAgreement
from lockstep.worker.graphs.mode import RunMode


class ThreadGather:
    """One all-gather over threads; object ``rank`` is the view of that rank."""

    def __init__(self, rank: int, slots: list, barrier: threading.Barrier) -> None:
        self.rank, self.slots, self.barrier = rank, slots, barrier
        self.ranks = tuple(range(0, 2 * len(slots), 2))

    def all_gather_object(self, obj: object) -> list:
        self.slots[self.rank] = obj
        self.barrier.wait(10)
        return list(self.slots)


def on_all_ranks(call, size: int) -> list:
    """Result or error of ``call(agreement, rank)`` on each of ``size`` threads."""
    slots, barrier, results = [None] * size, threading.Barrier(size), [None] * size

    def run(rank: int) -> None:
        gather = ThreadGather(rank, slots, barrier)
        try:
            results[rank] = call(CollectiveAgreement(gather, dispatcher().dispatch), rank)
        except RankMismatch as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@settings(max_examples=30)
@given(st.lists(batches, min_size=1, max_size=4))
def test_equal_on_all_ranks_and_to_the_central_one(proposals: list[Proposal]) -> None:
    results = on_all_ranks(lambda each, rank: each.agree(0, 7, proposals[rank]), len(proposals))
    assert results == [agree(proposals, dispatcher().dispatch)] * len(proposals)


def test_the_rank_with_another_batch_is_named_on_all() -> None:
    planned = agree([proposal("D", 5)] * 3, dispatcher().dispatch)
    runs = [proposal("D", 5), proposal("D", 5), proposal("D", 6)]
    results = on_all_ranks(lambda each, rank: each.verify(0, 9, runs[rank], planned), 3)
    assert results == ["rank 4 runs 6 tokens in step 9, the plan says 5"] * 3


def test_a_plan_with_another_mode_is_named() -> None:
    planned = StepAgreement(RunMode.PIECEWISE, 8, [5, 5], 1)
    results = on_all_ranks(lambda each, rank: each.verify(0, 9, proposal("D", 5), planned), 2)
    assert all("rank 0" in each and "the plan says" in each for each in results)


def test_agreeing_ranks_pass() -> None:
    planned = agree([proposal("D", 5), proposal("I", 1)], dispatcher().dispatch)
    runs = [proposal("D", 5), proposal("I", 1)]
    results = on_all_ranks(lambda each, rank: each.verify(0, 9, runs[rank], planned), 2)
    assert results == [None, None]


def _steps_with_a_skip(rank: Rank) -> str:
    """Rank 1 skips step 2."""
    topology = join(rank, tp_size=1, dp_size=rank.size, dp_lockstep="always")
    agreement = CollectiveAgreement(topology.dp, dispatcher().dispatch)
    found = "no difference seen"
    for step_id in (1, 2, 3) if rank.rank != 1 else (1, 3):
        try:
            agreement.agree(0, step_id, proposal("D", 3 + rank.rank))
        except RankMismatch as error:
            found = str(error)
            break
    topology.destroy()
    return found


def test_a_replica_that_skips_a_step_is_named_over_gloo() -> None:
    results = run_ranks(_steps_with_a_skip, 2, gloo=False)
    assert results == ["rank 1 is at step 3 of epoch 0, others at step 2 of epoch 0"] * 2


def _agree_over_gloo(rank: Rank) -> StepAgreement:
    topology = join(rank, tp_size=1, dp_size=2, dp_lockstep="always")
    agreement = CollectiveAgreement(topology.dp, dispatcher().dispatch)
    kind, tokens = [("D", 5), ("M", 300)][topology.spec.dp_rank]
    agreed = agreement.agree(0, 1, proposal(kind, tokens))
    topology.world.barrier()
    topology.destroy()
    return agreed


def test_agreement_over_gloo() -> None:
    agreed = StepAgreement(1, 304, [5, 300], 0)
    assert run_ranks(_agree_over_gloo, 2, gloo=False) == [agreed] * 2
