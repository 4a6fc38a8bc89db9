"""The way up of an engine on Ray: placement, actors, order of start.

The driver owns placement groups and actors, so that each can be replaced without the others.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from lockstep.comm.messages import WorkerReady
from lockstep.launcher.channels import Seating
from lockstep.launcher.create_actors import create_scheduler, create_worker
from lockstep.launcher.engine import EngineSummary, Progress
from lockstep.launcher.errors import StartError
from lockstep.launcher.guard import MARK
from lockstep.launcher.logs import rank_name
from lockstep.launcher.placement import Place, seating_of, specs_from_places
from lockstep.launcher.processes import boot_id
from lockstep.launcher.rank_host import IDLE, RankWorker
from lockstep.launcher.ray_engine import RayEngine
from lockstep.launcher.ray_member import RayMember
from lockstep.launcher.ray_session import RaySession, open_session
from lockstep.launcher.reserve import Reservation, others_of, owner_name
from lockstep.launcher.resolve import Resolved
from lockstep.launcher.scheduler_host import MakeDriver
from lockstep.launcher.supervise import Role, Supervisor

logger = logging.getLogger(__name__)

_SLICE_S = 0.2


def launch_engine(
    resolved: Resolved,
    progress: Progress,
    worker_type: type[RankWorker] | None,
    make_driver: MakeDriver | None,
) -> RayEngine:
    """See ``cluster.start_ray_engine``."""
    seconds: dict[str, float] = {}
    with _stage("ray", progress, seconds):
        session = open_session(num_ranks=resolved.world_size, device=resolved.device)
    launch = _Launch(resolved, session, progress, seconds)
    try:
        return launch.start(worker_type, make_driver)
    except BaseException:
        launch.close()
        raise


@dataclass
class _Launch:
    """An engine on its way up, and all that it holds outside this process."""

    resolved: Resolved
    session: RaySession
    progress: Progress
    seconds: dict[str, float]
    reservation: Reservation | None = None
    supervisor: Supervisor | None = None

    def start(
        self, worker_type: type[RankWorker] | None, make_driver: MakeDriver | None
    ) -> RayEngine:
        with self._stage("placement"):
            reservation = self._reserve()
        with self._stage("actors"):
            workers, scheduler = self._create(reservation, worker_type, make_driver)
            self.supervisor = Supervisor([*workers, scheduler])
            self.supervisor.start()
            places = self._locate(workers, scheduler)
        began = time.monotonic()
        ready = self._start_workers(workers, places)
        self.seconds["workers"] = time.monotonic() - began
        with self._stage("scheduler"):
            runs = self._serve(workers, scheduler, ready, seating_of(places))
        self.supervisor.serving()
        return RayEngine(
            scheduler=scheduler.handle,
            workers=[worker.handle for worker in workers],
            runs=runs,
            supervisor=self.supervisor,
            summary=EngineSummary(launcher="ray", ready=ready, launch_seconds=self.seconds),
            close=self.close,
        )

    def close(self) -> None:
        """End it all, in the other order. Tolerates whatever is gone already."""
        left: list[str] = []
        if self.supervisor is not None:
            self.supervisor.stop()
            left += self.supervisor.end_all()
        others = False
        if self.reservation is not None and ray.is_initialized():
            others = others_of(os.getpid(), self.session.mark)
            self.reservation.release()
        if not self.session.close(others=others):
            left.append(f"processes marked {MARK}={self.session.mark}")
        if left:
            logger.error("could not be ended: %s", ", ".join(left))

    def _reserve(self) -> Reservation:
        owner = owner_name(os.getpid(), self.session.mark)
        parallel, device = self.resolved.worker.parallel, self.resolved.device
        self.reservation = Reservation(parallel, owner=owner, device=device)
        timeout_s = self.resolved.launch.placement_timeout_seconds
        self.reservation.wait(timeout_s, fixed_size=self.session.is_local)
        return self.reservation

    def _create(
        self,
        reservation: Reservation,
        worker_type: type[RankWorker] | None,
        make_driver: MakeDriver | None,
    ) -> tuple[list[RayMember], RayMember]:
        config, mark = self.resolved.worker, self.session.mark
        workers = [
            create_worker(config, rank, reservation, mark, worker_type)
            for rank in range(self.resolved.world_size)
        ]
        scheduler = create_scheduler(config, reservation, mark, make_driver)
        members = [
            RayMember(Role.WORKER, f"rank {rank}", worker) for rank, worker in enumerate(workers)
        ]
        return members, RayMember(Role.SCHEDULER, "the scheduler", scheduler)

    def _locate(self, workers: list[RayMember], scheduler: RayMember) -> list[Place]:
        """Wait for the processes of all actors; learn which they are and what they were given."""
        asked = [worker.call("place") for worker in workers]
        *placed, process = self._wait([*asked, scheduler.call("process")])
        places = [place for place, _ in placed]
        members = [*zip(workers, placed, strict=True), (scheduler, (places[0], process))]
        for member, (place, own) in members:
            if place.boot_id == boot_id():
                member.process = own
        return places

    def _start_workers(self, workers: list[RayMember], places: list[Place]) -> list[WorkerReady]:
        parallel, device = self.resolved.worker.parallel, self.resolved.device
        (port,) = self._wait([workers[0].call("serve_store", seating_of(places).host)])
        specs = specs_from_places(places, parallel, device=device, port=port)
        for worker, spec in zip(workers, specs, strict=True):
            worker.name = rank_name(spec)
        starts = [w.call("start", spec) for w, spec in zip(workers, specs, strict=True)]
        ready: list[WorkerReady] = self._wait(starts, lambda: self._tell(workers[0]))
        return ready

    def _serve(
        self,
        workers: list[RayMember],
        scheduler: RayMember,
        ready: list[WorkerReady],
        seating: Seating,
    ) -> list["ray.ObjectRef[Any]"]:
        (channels,) = self._wait([scheduler.call("open", ready, seating)])
        scheduler.call("serve")
        runs = [w.call("run", own) for w, own in zip(workers, channels, strict=True)]
        return runs

    def _wait(
        self, refs: Sequence["ray.ObjectRef[Any]"], meanwhile: Callable[[], None] = lambda: None
    ) -> Any:
        """Results of calls on members, or the first cause of a failure of any member."""
        assert self.supervisor is not None
        while True:
            done, pending = ray.wait(list(refs), num_returns=len(refs), timeout=_SLICE_S)
            cause = self.supervisor.cause
            if cause is not None:
                raise StartError(cause.text) from cause.error
            if not pending:
                return self._results(refs, self.supervisor)
            meanwhile()

    def _results(self, refs: Sequence["ray.ObjectRef[Any]"], supervisor: Supervisor) -> Any:
        try:
            return ray.get(list(refs))
        except Exception as error:
            cause = supervisor.await_cause()
            if cause is None:
                raise
            raise StartError(cause.text) from cause.error or error

    def _tell(self, worker: RayMember) -> None:
        beat = worker.beat
        if beat.stage != IDLE:
            self.progress(beat.stage, beat.done, beat.total)

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return _stage(name, self.progress, self.seconds)


@contextmanager
def _stage(name: str, progress: Progress, seconds: dict[str, float]) -> Iterator[None]:
    """Time it, and show its begin and its end."""
    progress(name, 0, 1)
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began
    progress(name, 1, 1)
