"""The ``EngineClient`` of an engine whose scheduler runs in a thread of this process."""

import threading
from contextlib import suppress

from lockstep.comm.errors import CommError
from lockstep.comm.messages import AddRequest, TokenDelta
from lockstep.launcher.engine import EngineSummary
from lockstep.launcher.errors import EngineDead
from lockstep.launcher.in_flight import InFlight
from lockstep.launcher.scheduler_host import SchedulerHost
from lockstep.worker.schedule.stats import SchedulerStats

_STOP_S = 5.0
_VERDICT_S = 2.0


class HostEngine:
    """Requests to the scheduler's thread, deltas from it, its failure as ``EngineDead``."""

    def __init__(self, host: SchedulerHost, summary: EngineSummary) -> None:
        self._host = host
        self._summary = summary
        self._in_flight = InFlight()
        self._thread = threading.Thread(target=self._serve, name="scheduler", daemon=True)
        self._thread.start()

    def add(self, request: AddRequest) -> None:
        self._in_flight.add(request)
        try:
            self._host.add(request)
        except CommError as error:
            raise EngineDead(str(error)) from error

    def abort(self, req_id: str) -> None:
        self._host.abort(req_id)

    def poll(self, timeout_s: float) -> list[TokenDelta]:
        """See ``EngineClient.poll``. The failure comes after all deltas, those of errors too."""
        try:
            return self._in_flight.seen(self._host.poll(timeout_s))
        except CommError as error:
            raise EngineDead(str(error)) from error

    def stats(self) -> SchedulerStats:
        return self._host.stats()

    def summary(self) -> EngineSummary:
        """See ``EngineClient.summary``. Raises EngineDead if that is why requests have failed."""
        if self._in_flight.num_errors:
            # Whether they were refused or the engine has failed shows within a moment.
            self.poll(_VERDICT_S)
        return self._summary

    def shutdown(self) -> None:
        """See ``EngineClient.shutdown``."""
        if self._thread.is_alive():
            self._host.stop()
            self._thread.join(_STOP_S)

    def _serve(self) -> None:
        # The driver hands its failure to ``poll``.
        with suppress(CommError):
            self._host.serve()
