"""What a front end sees of a running engine, however it was started."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from lockstep.comm.messages import AddRequest, DeviceTimes, TokenDelta, WorkerReady
from lockstep.worker.schedule.stats import SchedulerStats

# (stage, done, total): total 0 if it is not known. Stages come in order; done == total ends one.
Progress = Callable[[str, int, int], None]


class EngineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine runs. ``launch_seconds`` is the launcher's own time by stage."""

    launcher: str
    ready: list[WorkerReady]
    launch_seconds: dict[str, float] = {}

    @property
    def ranks(self) -> int:
        return len(self.ready)

    @property
    def graph_mode(self) -> str:
        return self.ready[0].graph_mode

    @property
    def num_graphs(self) -> int:
        """Graphs that each rank captured before it could serve (the same on all)."""
        return self.ready[0].num_graphs


class EngineClient(Protocol):
    """Requests in, tokens out. One thread calls it; only ``stats`` may be called from another.

    A request that the scheduler refuses comes back as a ``TokenDelta`` with finish_reason "error".
    Every added request gets exactly one delta with a finish_reason.
    """

    def add(self, request: AddRequest) -> None:
        """Send a request. Raises ValueError if its ``req_id`` is that of one in flight."""
        ...

    def abort(self, req_id: str) -> None:
        """End a request early; an unknown or finished one is ignored."""
        ...

    def poll(self, timeout_s: float) -> list[TokenDelta]:
        """Deltas that have arrived, in order per request; waits up to ``timeout_s`` for the first.

        Raises:
            EngineDead: a rank or the scheduler is lost; the message names it.
        """
        ...

    def stats(self) -> SchedulerStats: ...

    def summary(self) -> EngineSummary: ...

    def shutdown(self) -> None:
        """End every process of the engine. Safe to call twice and after a failure."""
        ...


class TimedEngine(EngineClient, Protocol):
    """One whose ranks can be asked when their steps ran."""

    def device_times(self) -> list[DeviceTimes]:
        """Of each rank, in order of global rank, while no request is in flight.

        Raises:
            LaunchError: a rank does not answer.
        """
        ...
