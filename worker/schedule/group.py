"""A lockstep group: replicas that take every step together, and its steps in flight."""

from collections import deque

from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import StepAgreement
from lockstep.parallel.agreement import Dispatch, Proposal, agree
from lockstep.worker.schedule.late_captures import LateCaptures
from lockstep.worker.schedule.policy import PrefillAlignment
from lockstep.worker.schedule.replica import Replica, StepLanes
from lockstep.worker.step_text import step_text


class StepInFlight:
    """A planned step: how to read each replica's result, until that has come."""

    __slots__ = ("agreement", "capture", "first_dp_rank", "lanes", "masked", "missing", "step_id")

    def __init__(
        self,
        first_dp_rank: int,
        step_id: int,
        agreement: StepAgreement,
        lanes: list[StepLanes],
        capture: int | None = None,
    ) -> None:
        self.first_dp_rank = first_dp_rank
        self.step_id = step_id
        self.agreement = agreement
        self.capture = capture
        self.lanes: list[StepLanes | None] = list(lanes)
        self.masked = any(each.masked for each in lanes)
        self.missing = len(lanes)

    def __str__(self) -> str:
        return step_text(self.agreement, self.capture)

    def missing_dp_ranks(self) -> list[int]:
        """Replicas whose result has not come."""
        return [
            self.first_dp_rank + index
            for index, lanes in enumerate(self.lanes)
            if lanes is not None
        ]


class LockstepGroup:
    """Replicas ``first_dp_rank`` .. of one group; step ids count from 0."""

    def __init__(
        self,
        first_dp_rank: int,
        replicas: list[Replica],
        captures: LateCaptures,
        *,
        max_prefill_defer_steps: int,
    ) -> None:
        self.first_dp_rank = first_dp_rank
        self.replicas = replicas
        self.captures = captures
        self.alignment = PrefillAlignment(max_prefill_defer_steps)
        self.in_flight: deque[StepInFlight] = deque()
        self.next_step_id = 0
        self._last_agreed: tuple[list[Proposal], StepAgreement] | None = None

    def has_work(self) -> bool:
        return any(replica.has_work() for replica in self.replicas)

    def must_await(self, run_ahead: int) -> bool:
        """Whether results are needed before another step can be planned.

        Of a step with masks always: what a grammar allows next depends on the token.
        """
        steps = self.in_flight
        return bool(steps) and (len(steps) >= run_ahead or steps[-1].masked)

    def agree(
        self, proposals: list[Proposal], dispatch: Dispatch, *, query_len: int
    ) -> StepAgreement:
        """Agreement of the replicas; in steady decode it is that of the step before."""
        if self._last_agreed is None or self._last_agreed[0] != proposals:
            agreement = agree(proposals, dispatch, query_len=query_len)
            self._last_agreed = (proposals, agreement)
        return self._last_agreed[1]

    def launch(self, agreement: StepAgreement, lanes: list[StepLanes]) -> int:
        """Note a planned step and return its id."""
        step_id = self.next_step_id
        self.in_flight.append(StepInFlight(self.first_dp_rank, step_id, agreement, lanes))
        self.next_step_id += 1
        return step_id

    def order_capture(self, agreement: StepAgreement) -> tuple[int, int]:
        """Note that the next late graph is captured now: (step id, place in the manifest)."""
        step_id = self.next_step_id
        position = self.captures.take(step_id)
        lanes = [StepLanes(()) for _ in self.replicas]
        self.in_flight.append(StepInFlight(self.first_dp_rank, step_id, agreement, lanes, position))
        self.next_step_id += 1
        # What was agreed by the graphs so far may no longer be the best.
        self._last_agreed = None
        return step_id, position

    def land(self, step_id: int, index: int) -> StepLanes | None:
        """Take the lane table of a replica's result; None if none is awaited.

        Raises:
            RankMismatch: the replica has not answered an earlier step.
        """
        for step in self.in_flight:
            lanes = step.lanes[index]
            if lanes is None:
                continue
            if step.step_id == step_id:
                step.lanes[index] = None
                step.missing -= 1
                self._retire()
                return lanes
            if step.step_id < step_id < self.next_step_id:
                raise RankMismatch(
                    f"dp_rank {self.first_dp_rank + index} answered step {step_id} "
                    f"before step {step.step_id}"
                )
            return None
        return None

    def _retire(self) -> None:
        while self.in_flight and not self.in_flight[0].missing:
            self.in_flight.popleft()
