"""The loop around a Scheduler: plans out, results in, requests and deltas between threads."""

import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Event
from typing import Protocol

from msgspec import structs

from lockstep.comm.codec import decode_result, encode
from lockstep.comm.errors import CommError, PeerLost
from lockstep.comm.messages import (
    AddRequest,
    StepResult,
    StopWorkers,
    TokenDelta,
    WorkerFailed,
    lost_request,
)
from lockstep.parallel.mesh import global_rank
from lockstep.worker.schedule.comparison import ResultComparison
from lockstep.worker.schedule.group import StepInFlight
from lockstep.worker.schedule.inbox import Inbox, Outbox
from lockstep.worker.schedule.scheduler import Scheduler
from lockstep.worker.schedule.stats import SchedulerStats
from lockstep.worker.schedule.step_times import no_step_times

STEP_TIMEOUT_S = 30.0
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3
_IDLE_WAIT_S = 0.1
_STOP_TIMEOUT_S = 2.0


class PlanWriter(Protocol):
    """A ``RingWriter`` that all ranks of a lockstep group read."""

    def write(self, data: bytes, timeout_s: float = ...) -> None: ...


class ResultReader(Protocol):
    """A ``RingReader`` of one rank's results; ``read`` also notices that the rank is gone."""

    def poll(self) -> bytes | None: ...

    def read(self, timeout_s: float) -> bytes | None: ...


class SchedulerDriver:
    """Owns a scheduler. One thread calls ``run``; all other methods are safe from any thread.

    Args:
        plan_writers: one per lockstep group. A ring must hold ``run_ahead`` of the largest plans,
            so that a slow group never makes the others wait.
        result_readers: one per rank, in order of global rank.
        step_timeout_s: a rank that takes longer for a step is taken for lost.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        plan_writers: Sequence[PlanWriter],
        result_readers: Sequence[ResultReader],
        *,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        parallel = scheduler.parallel
        if len(plan_writers) != scheduler.num_groups:
            raise ValueError(
                f"plan_writers must be one for each of {scheduler.num_groups} lockstep groups, "
                f"got {len(plan_writers)}"
            )
        if len(result_readers) != parallel.world_size:
            raise ValueError(
                f"result_readers must be one for each of {parallel.world_size} ranks, "
                f"got {len(result_readers)}"
            )
        self._scheduler = scheduler
        self._parallel = parallel
        self._plans = list(plan_writers)
        self._results = list(result_readers)
        self._step_timeout_s = step_timeout_s
        self._comparison = ResultComparison(parallel) if parallel.verify_agreement else None
        self._inbox = Inbox()
        self._outbox = Outbox()
        # Since when each group's oldest step in flight has been the oldest.
        self._since = [0.0] * scheduler.num_groups
        size = parallel.lockstep_dp_size
        self._times = [no_step_times(size * group) for group in range(scheduler.num_groups)]

    def add(self, request: AddRequest) -> None:
        """Hand in a request. One that is refused comes back as a delta with an error.

        Raises:
            ValueError: the ``req_id`` is in use.
        """
        self._inbox.add(request)

    def abort(self, req_id: str) -> None:
        """End a request; one that is unknown or has ended is ignored."""
        self._inbox.abort(req_id)

    def poll_deltas(self, timeout_s: float = 0.0) -> list[TokenDelta]:
        """Deltas so far; waits up to ``timeout_s`` for the first.

        Raises:
            CommError: what ended ``run``, once all deltas are read.
        """
        return self._outbox.take(timeout_s)

    def stats(self) -> SchedulerStats:
        return structs.replace(self._scheduler.stats(), step_times=self._times)

    def run(self, stop: Event) -> None:
        """Plan and commit until ``stop`` is set, then tell the ranks to stop.

        Raises:
            PeerLost: a rank failed, is gone, or is late; it is named. Every request has then got
                its last delta, with the error.
            CommError: ranks disagree, or a ring is broken.
        """
        try:
            self._turn_until(stop)
        except Exception as error:
            self._end(str(error))
            self._outbox.close(error)
            raise
        self._end("the scheduler stops")

    def run_once(self) -> bool:
        """One turn over inbox, result rings and groups; True if anything moved."""
        moved = self._take_requests()
        for rank, reader in enumerate(self._results):
            while (data := reader.poll()) is not None:
                self._take_result(rank, data)
                moved = True
        for group in range(self._scheduler.num_groups):
            while self._give_plan(group):
                moved = True
        self._publish(self._scheduler.take_deltas())
        return moved

    def _turn_until(self, stop: Event) -> None:
        sleep_s = _FIRST_SLEEP_S
        while not stop.is_set():
            if self.run_once():
                sleep_s = _FIRST_SLEEP_S
                continue
            self._look_for_the_lost()
            if self._scheduler.has_work():
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            elif not self._inbox.wake.wait(_IDLE_WAIT_S):
                self._use_idle_time()

    def _take_requests(self) -> bool:
        messages = self._inbox.take()
        for message in messages:
            if not isinstance(message, AddRequest):
                self._scheduler.abort(message.req_id)
                continue
            try:
                self._scheduler.add(message)
            except ValueError as error:
                refused = TokenDelta(message.req_id, finish_reason="error", error=str(error))
                self._publish([refused])
        return bool(messages)

    def _take_result(self, rank: int, data: bytes) -> None:
        result = decode_result(data)
        if isinstance(result, WorkerFailed):
            failed = PeerLost(result.global_rank, f"step {result.step_id}: {result.error}")
            failed.add_note(result.traceback)
            raise failed
        expected = divmod(rank, self._parallel.tp_size)
        if (result.dp_rank, result.tp_rank) != expected:
            raise PeerLost(rank, f"it calls itself {result.dp_rank, result.tp_rank}")
        agreed: StepResult | None = result
        if self._comparison is not None and result.epoch == self._scheduler.epoch:
            agreed = self._comparison.hear(result)
        if agreed is not None:
            self._commit(agreed)

    def _commit(self, result: StepResult) -> None:
        group = result.dp_rank // self._parallel.lockstep_dp_size
        times, began = self._times[group], time.monotonic()
        oldest = self._scheduler.oldest_step(group)
        self._publish(self._scheduler.commit(result))
        ended = time.monotonic()
        times.commit.observe(ended - began)
        landed = self._scheduler.oldest_step(group) is not oldest
        if result.captured is None:
            times.launch.observe(result.launch_s)
            if landed:
                times.step.observe(ended - self._since[group])
        if landed:
            self._since[group] = ended

    def _give_plan(self, group: int) -> bool:
        began = time.monotonic()
        was_idle = self._scheduler.oldest_step(group) is None
        plan = self._scheduler.plan(group)
        if plan is None:
            return False
        if was_idle:
            self._since[group] = began
        self._plans[group].write(encode(plan), timeout_s=self._step_timeout_s)
        self._times[group].plan.observe(time.monotonic() - began)
        return True

    def _use_idle_time(self) -> None:
        """Nothing has come for a while: each group captures a graph that is still to come."""
        for group, writer in enumerate(self._plans):
            plan = self._scheduler.plan_capture(group)
            if plan is not None:
                self._since[group] = time.monotonic()
                writer.write(encode(plan), timeout_s=self._step_timeout_s)

    def _publish(self, deltas: list[TokenDelta]) -> None:
        self._inbox.forget(deltas)
        self._outbox.put(deltas)

    def _look_for_the_lost(self) -> None:
        """Raise PeerLost for a rank that is gone or late."""
        now = time.monotonic()
        for group, since in enumerate(self._since):
            step = self._scheduler.oldest_step(group)
            if step is not None and now - since > self._step_timeout_s:
                raise self._late(step)
        for rank, reader in enumerate(self._results):
            try:
                data = reader.read(0.0)
            except CommError as error:
                raise PeerLost(rank, str(error)) from error
            if data is not None:
                self._take_result(rank, data)

    def _late(self, step: StepInFlight) -> PeerLost:
        (dp_rank, *_) = step.missing_dp_ranks()
        silent = [0]
        if self._comparison is not None:
            silent = self._comparison.silent(dp_rank, step.step_id)
        return PeerLost(
            global_rank(dp_rank, silent[0], self._parallel),
            f"dp_rank {dp_rank} tp_rank {silent[0]} gave no result of step {step.step_id} "
            f"({step}) within {self._step_timeout_s:g} s",
        )

    def _end(self, reason: str) -> None:
        """Give every request its last delta and every rank the word to stop."""
        self._scheduler.fail_all(reason)
        self._publish(self._scheduler.take_deltas())
        never_added = self._inbox.close(reason)
        self._outbox.put([lost_request(each, reason) for each in never_added])
        stop = encode(StopWorkers(self._scheduler.epoch, reason))
        for writer in self._plans:
            with suppress(CommError):
                writer.write(stop, timeout_s=_STOP_TIMEOUT_S)
