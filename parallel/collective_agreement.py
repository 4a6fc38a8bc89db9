"""The agreement of ``agree`` over one host all-gather of named ints, for ranks without a common
scheduler, and as the check of the one that the scheduler put in a plan."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import StepAgreement
from lockstep.parallel.agreement import Dispatch, Proposal, agree


class HostGather(Protocol):
    """The part of a Communicator that is used; ``ranks`` are global, in order of dp_rank."""

    @property
    def ranks(self) -> Sequence[int]: ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...


class Vote(NamedTuple):
    """What a rank sends: where it is and what it wants to run. The columns of the gather."""

    epoch: int
    step_id: int
    num_tokens: int
    num_reqs: int
    uniform_query_len: int
    num_active_loras: int
    max_mode: int


class CollectiveAgreement:
    """Fixes steps with the ranks of the same tp_rank over all replicas of a lockstep group.

    Every rank of ``group`` must call for every step, also when its replica is idle.
    """

    def __init__(self, group: HostGather, dispatch: Dispatch, *, query_len: int = 1) -> None:
        self._group = group
        self._dispatch = dispatch
        self._query_len = query_len

    def agree(self, epoch: int, step_id: int, proposal: Proposal) -> StepAgreement:
        """The agreement for this step, equal on all ranks.

        Raises:
            RankMismatch: a rank is at another epoch or step.
        """
        gathered = self._group.all_gather_object(list(Vote(epoch, step_id, *proposal)))
        votes = [Vote(*columns) for columns in gathered]
        self._check_together(votes)
        proposals = [Proposal(*vote[2:]) for vote in votes]
        return agree(proposals, self._dispatch, query_len=self._query_len)

    def verify(self, epoch: int, step_id: int, proposal: Proposal, planned: StepAgreement) -> None:
        """Compare with the agreement of the plan.

        Raises:
            RankMismatch: names the rank whose batch is not the planned one, or the field.
        """
        agreed = self.agree(epoch, step_id, proposal)
        counts = zip(
            self._group.ranks,
            agreed.num_tokens_across_dp,
            planned.num_tokens_across_dp,
            strict=True,
        )
        for rank, own, expected in counts:
            if own != expected:
                raise RankMismatch(
                    f"rank {rank} runs {own} tokens in step {step_id}, the plan says {expected}"
                )
        if agreed != planned:
            raise RankMismatch(
                f"rank {self._group.ranks[0]} and its peers agree on {agreed} for step "
                f"{step_id}, the plan says {planned}"
            )

    def _check_together(self, votes: list[Vote]) -> None:
        places = [(vote.epoch, vote.step_id) for vote in votes]
        (common, _), *others = Counter(places).most_common()
        if not others:
            return
        rank, place = next(
            (rank, place)
            for rank, place in zip(self._group.ranks, places, strict=True)
            if place != common
        )
        raise RankMismatch(
            f"rank {rank} is at step {place[1]} of epoch {place[0]}, "
            f"others at step {common[1]} of epoch {common[0]}"
        )
