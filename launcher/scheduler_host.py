"""What the scheduler's process does, whoever started it: channels, driver thread, requests, deltas.

No torch and no ray: the scheduler runs where there is no GPU.
"""

from collections.abc import Callable
from threading import Event
from typing import Protocol

from msgspec import structs

from lockstep.comm.channel import ChannelReader, ChannelWriter
from lockstep.comm.messages import AddRequest, TokenDelta, WorkerReady
from lockstep.launcher.channels import RankChannels, SchedulerChannels, Seating
from lockstep.worker.config import WorkerConfig
from lockstep.worker.heap import Heap
from lockstep.worker.schedule.stats import SchedulerStats


class Driver(Protocol):
    """The part of ``worker.schedule.driver.SchedulerDriver`` that its host calls."""

    def add(self, request: AddRequest) -> None: ...
    def abort(self, req_id: str) -> None: ...
    def poll_deltas(self, timeout_s: float = 0.0) -> list[TokenDelta]: ...
    def stats(self) -> SchedulerStats: ...
    def run(self, stop: Event) -> None: ...


# (config, blocks of each replica, a plan writer a lockstep group, a result reader a rank)
MakeDriver = Callable[[WorkerConfig, list[int], list[ChannelWriter], list[ChannelReader]], Driver]


class SchedulerHost:
    """One scheduler. ``serve`` occupies a thread; everything else may come from other threads."""

    def __init__(
        self,
        config: WorkerConfig,
        ready: list[WorkerReady],
        make_driver: MakeDriver | None = None,
        *,
        seating: Seating,
    ) -> None:
        tp_size = config.parallel.tp_size
        num_blocks = [rank.num_blocks for rank in ready[::tp_size]]
        self._channels = SchedulerChannels(config, seating)
        writers, readers = self._channels.plan_writers, self._channels.result_readers
        self._driver = (make_driver or real_driver)(config, num_blocks, writers, readers)
        self._stop = Event()
        self._heap = Heap()

    def addresses(self) -> list[RankChannels]:
        """What each rank attaches to, in order of global rank."""
        return self._channels.addresses()

    def serve(self) -> None:
        """Plan and commit until ``stop``. Raises what ended it otherwise, naming the rank."""
        try:
            with self._heap.frozen():
                self._driver.run(self._stop)
        finally:
            self._channels.close()

    def add(self, request: AddRequest) -> None:
        self._driver.add(request)

    def abort(self, req_id: str) -> None:
        self._driver.abort(req_id)

    def poll(self, timeout_s: float) -> list[TokenDelta]:
        """Deltas so far; waits up to ``timeout_s`` for the first."""
        return self._driver.poll_deltas(timeout_s)

    def stats(self) -> SchedulerStats:
        pause_s = self._heap.longest_pause_s, self._heap.longest_pause_cpu_s
        return structs.replace(self._driver.stats(), longest_gc_pause_s=pause_s)

    def stop(self) -> None:
        """Have ``serve`` end: it tells the ranks to stop and returns."""
        self._stop.set()


def real_driver(
    config: WorkerConfig,
    num_blocks: list[int],
    plan_writers: list[ChannelWriter],
    result_readers: list[ChannelReader],
) -> Driver:
    from lockstep.launcher.grammars import create_compiler
    from lockstep.worker.schedule.driver import SchedulerDriver
    from lockstep.worker.schedule.scheduler import Scheduler

    scheduler = Scheduler(
        config.model,
        config.schedule,
        config.cache,
        config.parallel,
        config.graph,
        num_blocks,
        compiler=create_compiler(config),
    )
    return SchedulerDriver(scheduler, plan_writers, result_readers)
