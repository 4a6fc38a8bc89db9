"""The ``EngineClient`` of an engine whose scheduler and ranks are Ray actors."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError

from lockstep.comm.messages import AddRequest, DeviceTimes, TokenDelta
from lockstep.launcher.actors import decode_deltas
from lockstep.launcher.engine import EngineSummary
from lockstep.launcher.errors import EngineDead
from lockstep.launcher.in_flight import InFlight
from lockstep.launcher.supervise import Cause, Supervisor
from lockstep.worker.schedule.stats import SchedulerStats

_SLICE_S = 0.2
_POLL_S = 1.0
_REPLY_S = 30.0
_STOP_S = 5.0
_VERDICT_S = 2.0


class RayEngine:
    """Requests to the scheduler actor, deltas from it, a lost process as ``EngineDead``.

    ``close`` ends whatever is left of the engine; it is called once, last.
    """

    def __init__(
        self,
        *,
        scheduler: Any,
        workers: Sequence[Any],
        runs: Sequence["ray.ObjectRef[None]"],
        supervisor: Supervisor,
        summary: EngineSummary,
        close: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._workers = list(workers)
        self._runs = list(runs)
        self._supervisor = supervisor
        self._summary = summary
        self._close: Callable[[], None] | None = close
        self._polled: ray.ObjectRef[bytes] | None = None
        self._in_flight = InFlight()

    def add(self, request: AddRequest) -> None:
        self._in_flight.add(request)
        self._scheduler.add.remote(request)

    def abort(self, req_id: str) -> None:
        self._scheduler.abort.remote(req_id)

    def poll(self, timeout_s: float) -> list[TokenDelta]:
        """See ``EngineClient.poll``. What was in flight when the engine died ends with an error
        first; the call after that raises.
        """
        try:
            return self._in_flight.seen(self._poll(timeout_s))
        except EngineDead as error:
            lost = self._in_flight.end(str(error))
            if not lost:
                raise
            return lost

    def stats(self) -> SchedulerStats:
        stats: SchedulerStats = self._reply(self._scheduler.stats.remote())
        return stats

    def device_times(self) -> list[DeviceTimes]:
        """See ``TimedEngine.device_times``."""
        times: list[DeviceTimes] = self._reply([w.device_times.remote() for w in self._workers])
        return times

    def summary(self) -> EngineSummary:
        """See ``EngineClient.summary``. Raises EngineDead if that is why requests have failed."""
        if self._in_flight.num_errors:
            # Whether they were refused or the engine has failed shows within a moment.
            self._poll(_VERDICT_S)
        return self._summary

    def shutdown(self) -> None:
        """See ``EngineClient.shutdown``."""
        close, self._close = self._close, None
        if close is None:
            return
        try:
            if self._supervisor.cause is None:
                self._stop_ranks()
        finally:
            close()

    def _stop_ranks(self) -> None:
        # Only what ends by itself frees device memory in order; the rest is killed by ``close``.
        self._supervisor.stop()
        with suppress(RayError):
            ray.get(self._scheduler.stop.remote(), timeout=_STOP_S)
            ray.wait(self._runs, num_returns=len(self._runs), timeout=_STOP_S)

    def _poll(self, timeout_s: float) -> list[TokenDelta]:
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            deltas = self._poll_once(min(left_s, _SLICE_S))
            if deltas or not left_s:
                return deltas

    def _poll_once(self, timeout_s: float) -> list[TokenDelta]:
        cause = self._supervisor.cause
        if cause is not None:
            _raise_dead(cause)
        # One question is always open, so that deltas need not wait to be asked for.
        if self._polled is None:
            self._polled = self._scheduler.poll.remote(_POLL_S)
        done, _ = ray.wait([self._polled], timeout=timeout_s)
        if not done:
            return []
        self._polled = self._scheduler.poll.remote(_POLL_S)
        return decode_deltas(self._reply(done[0]))

    def _reply(self, asked: "ray.ObjectRef[Any] | list[ray.ObjectRef[Any]]") -> Any:
        try:
            return ray.get(asked, timeout=_REPLY_S)
        except RayError as error:
            # The supervisor knows better than a failed call what has happened, a moment later.
            cause = self._supervisor.await_cause()
            if cause is not None:
                _raise_dead(cause)
            raise EngineDead(f"the scheduler does not answer: {error}") from error


def _raise_dead(cause: Cause) -> NoReturn:
    raise EngineDead(cause.text) from cause.error
