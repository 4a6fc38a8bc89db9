"""An engine of one host without Ray: ranks are child processes, the scheduler a thread here.

Everything behind the start is the same, so what a step takes more under Ray is Ray's.
"""

import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from lockstep.comm.messages import DeviceTimes, WorkerReady
from lockstep.launcher.channels import Seating
from lockstep.launcher.child_rank import ChildRank
from lockstep.launcher.engine import EngineSummary, Progress
from lockstep.launcher.front_link import Stage
from lockstep.launcher.host_engine import HostEngine
from lockstep.launcher.placement import LOOPBACK
from lockstep.launcher.rank_env import Seat, spec_of_seat
from lockstep.launcher.resolve import Resolved
from lockstep.launcher.scheduler_host import SchedulerHost


class ChildEngine(HostEngine):
    """A ``TimedEngine``. ``shutdown`` also waits for the ranks' processes."""

    def __init__(
        self, host: SchedulerHost, summary: EngineSummary, ranks: Sequence[ChildRank]
    ) -> None:
        super().__init__(host, summary)
        self._ranks = list(ranks)

    def device_times(self) -> list[DeviceTimes]:
        return [rank.device_times() for rank in self._ranks]

    def shutdown(self) -> None:
        super().shutdown()
        for rank in self._ranks:
            rank.end()


def start_child_engine(resolved: Resolved, progress: Progress) -> ChildEngine:
    """Start all ranks and serve them; called from the main thread, with which they die.

    Raises:
        StartError: a rank failed; names it and its reason.
    """
    began = time.monotonic()
    ranks = [ChildRank(rank, resolved.worker) for rank in range(resolved.world_size)]
    try:
        ready = _start(resolved, ranks, progress)
        host = SchedulerHost(resolved.worker, ready, seating=Seating())
        for rank, channels in zip(ranks, host.addresses(), strict=True):
            rank.tell(channels)
    except BaseException:
        for rank in ranks:
            rank.end()
        raise
    seconds = {"workers": time.monotonic() - began}
    summary = EngineSummary(launcher="processes", ready=ready, launch_seconds=seconds)
    return ChildEngine(host, summary, ranks)


def _start(resolved: Resolved, ranks: Sequence[ChildRank], progress: Progress) -> list[WorkerReady]:
    port = ranks[0].hear()
    assert isinstance(port, int)
    for rank in ranks:
        seat = _seat(rank.rank, len(ranks), port)
        rank.tell(spec_of_seat(seat, resolved.worker.parallel, device=resolved.device))
    return _gather(ranks, progress)


def _seat(rank: int, world_size: int, port: int) -> Seat:
    return Seat(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        node_rank=0,
        master_addr=LOOPBACK,
        master_port=port,
    )


def _gather(ranks: Sequence[ChildRank], progress: Progress) -> list[WorkerReady]:
    """Everybody's, in order of rank; rank 0's stages are shown meanwhile."""
    waiting, ready = list(ranks), dict[int, WorkerReady]()
    while waiting:
        spoke = wait([rank.connection for rank in waiting])
        for rank in [rank for rank in waiting if rank.connection in spoke]:
            message = rank.hear()
            if isinstance(message, WorkerReady):
                ready[rank.rank] = message
                waiting.remove(rank)
            elif isinstance(message, Stage) and rank.rank == 0:
                progress(message.stage, message.done, message.total)
    return [ready[rank.rank] for rank in ranks]
