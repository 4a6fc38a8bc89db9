"""Scheduler and one worker in this process, one step at a time: the oracle of the other launchers.

No ring, no second process, no overlap: what differs from it elsewhere is a defect there.
"""

import time

from lockstep.comm.messages import AddRequest, DeviceTimes, TokenDelta, WorkerReady
from lockstep.launcher.engine import EngineSummary, Progress
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.grammars import create_compiler
from lockstep.launcher.in_flight import InFlight
from lockstep.launcher.resolve import Resolved
from lockstep.parallel.rank_spec import RankSpec
from lockstep.parallel.topology import Topology
from lockstep.worker.loop import Worker
from lockstep.worker.schedule.scheduler import Scheduler
from lockstep.worker.schedule.stats import SchedulerStats


class InlineEngine:
    """An ``EngineClient`` of one rank; every ``poll`` runs at most one step."""

    def __init__(self, scheduler: Scheduler, worker: Worker, summary: EngineSummary) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._summary = summary
        self._in_flight = InFlight()
        self._refused: list[TokenDelta] = []
        self._closed = False

    def add(self, request: AddRequest) -> None:
        self._in_flight.add(request)
        try:
            self._scheduler.add(request)
        except ValueError as error:
            refusal = TokenDelta(request.req_id, finish_reason="error", error=str(error))
            self._refused.append(refusal)

    def abort(self, req_id: str) -> None:
        self._scheduler.abort(req_id)

    def poll(self, timeout_s: float) -> list[TokenDelta]:
        deltas, self._refused = self._refused, []
        plan = self._scheduler.plan(0)
        if plan is not None:
            for result in self._worker.execute(plan):
                deltas += self._scheduler.commit(result)
        return self._in_flight.seen(deltas + self._scheduler.take_deltas())

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def summary(self) -> EngineSummary:
        return self._summary

    def device_times(self) -> list[DeviceTimes]:
        return [self._worker.device_times()]

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._worker.close()


def start_inline_engine(resolved: Resolved, progress: Progress | None = None) -> InlineEngine:
    """Load the model here and run it one step a poll.

    Raises:
        ConfigError: more than one rank is asked for.
    """
    if resolved.world_size != 1:
        raise ConfigError(f"an inline engine has one rank, got {resolved.world_size}")
    config = resolved.worker
    device = "cuda:0" if resolved.device == "cuda" else "cpu"
    spec = RankSpec(global_rank=0, world_size=1, dp_rank=0, tp_rank=0, device=device)
    began = time.monotonic()
    worker = Worker(config, spec, Topology.single(device))
    ready = worker.start(progress)
    seconds = {"worker": time.monotonic() - began}
    summary = EngineSummary(launcher="inline", ready=[ready], launch_seconds=seconds)
    return InlineEngine(_scheduler(resolved, ready), worker, summary)


def _scheduler(resolved: Resolved, ready: WorkerReady) -> Scheduler:
    config = resolved.worker
    return Scheduler(
        config.model,
        config.schedule,
        config.cache,
        config.parallel,
        config.graph,
        ready.num_blocks,
        compiler=create_compiler(config),
    )
