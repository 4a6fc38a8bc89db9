"""The Ray shells: one actor a rank, one for the scheduler. Thin; the hosts hold the logic.

Neither imports torch when Ray unpickles it. ``run`` and ``serve`` occupy the default concurrency
group for as long as the engine lives; everything that must answer meanwhile has its own.
"""

import os
import socket
import time
from collections.abc import Callable, MutableMapping

import msgspec
import ray

from lockstep.comm.messages import AddRequest, DeviceTimes, TokenDelta, WorkerReady
from lockstep.launcher.channels import RankChannels, Seating
from lockstep.launcher.logs import setup_logging
from lockstep.launcher.network import use_route
from lockstep.launcher.placement import LOOPBACK, VISIBLE, Place
from lockstep.launcher.processes import ProcessId, boot_id, on_exit_of, this_process
from lockstep.launcher.rank_env import foreign_variables
from lockstep.launcher.rank_host import IDLE, Beat, RankHost, RankWorker
from lockstep.launcher.scheduler_host import MakeDriver, SchedulerHost
from lockstep.parallel.rank_spec import RankSpec
from lockstep.worker.config import WorkerConfig
from lockstep.worker.schedule.stats import SchedulerStats

POLL_EVERY_S = 0.005
WORKER_GROUPS = {"control": 2}
SCHEDULER_GROUPS = {"requests": 1, "deltas": 1, "control": 2}

encode_deltas: Callable[[list[TokenDelta]], bytes] = msgspec.msgpack.Encoder().encode
decode_deltas = msgspec.msgpack.Decoder(list[TokenDelta]).decode


class WorkerActor:
    """One rank. Calls in order: place, serve_store (rank 0), start, run."""

    def __init__(self, config: WorkerConfig, worker_type: type[RankWorker] | None = None) -> None:
        end_with_raylet()
        self._host = RankHost(config, worker_type)

    @ray.method(concurrency_group="control")
    def place(self) -> tuple[Place, ProcessId]:
        return place_of_this_actor(), this_process()

    def serve_store(self, host: str) -> int:
        return self._host.serve_store(host)

    def start(self, spec: RankSpec) -> WorkerReady:
        own_environment(spec, os.environ)
        if spec.master_addr != LOOPBACK:
            use_route(spec.master_addr, os.environ)
        return self._host.start(spec)

    def run(self, channels: RankChannels) -> None:
        self._host.run(channels)

    @ray.method(concurrency_group="control")
    def device_times(self) -> DeviceTimes:
        return self._host.device_times()

    @ray.method(concurrency_group="control")
    def beat(self) -> Beat:
        return self._host.beat()


class SchedulerActor:
    """The scheduler. Calls in order: process, open, serve."""

    def __init__(self, config: WorkerConfig, make_driver: MakeDriver | None = None) -> None:
        setup_logging("scheduler")
        end_with_raylet()
        self._config = config
        self._make_driver = make_driver
        self._host: SchedulerHost | None = None
        self._next_poll = 0.0

    @ray.method(concurrency_group="control")
    def process(self) -> ProcessId:
        return this_process()

    def open(self, ready: list[WorkerReady], seating: Seating) -> list[RankChannels]:
        """Make the scheduler for the blocks there are, and the channels; one address set a rank."""
        self._host = SchedulerHost(self._config, ready, self._make_driver, seating=seating)
        return self._host.addresses()

    def serve(self) -> None:
        self._opened().serve()

    @ray.method(concurrency_group="requests")
    def add(self, request: AddRequest) -> None:
        self._opened().add(request)

    @ray.method(concurrency_group="requests")
    def abort(self, req_id: str) -> None:
        self._opened().abort(req_id)

    @ray.method(concurrency_group="deltas")
    def poll(self, timeout_s: float) -> bytes:
        """Deltas: at once after a pause, else those of a few steps, since a call costs a step."""
        time.sleep(max(0.0, self._next_poll - time.monotonic()))
        deltas = self._opened().poll(timeout_s)
        self._next_poll = time.monotonic() + POLL_EVERY_S
        return encode_deltas(deltas)

    @ray.method(concurrency_group="control")
    def stats(self) -> SchedulerStats:
        return self._opened().stats()

    @ray.method(concurrency_group="control")
    def beat(self) -> Beat:
        return Beat(IDLE)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        self._opened().stop()

    def _opened(self) -> SchedulerHost:
        assert self._host is not None, "open comes before serve"
        return self._host


def end_with_raylet() -> None:
    """Exit when the raylet does, which is the parent here: Ray takes a quarter of a minute."""
    on_exit_of(os.getppid(), lambda: os._exit(1))


def place_of_this_actor() -> Place:
    context = ray.get_runtime_context()
    return Place(
        node_id=context.get_node_id(),
        address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=boot_id(),
        gpu_ids=tuple(sorted(context.get_accelerator_ids().get("GPU", []))),
        visible=os.environ.get(VISIBLE),
    )


def own_environment(spec: RankSpec, env: MutableMapping[str, str]) -> None:
    """Replace another launcher's variables by this rank's own, for libraries that read them."""
    for name in foreign_variables(env):
        del env[name]
    env.update(
        RANK=str(spec.global_rank),
        LOCAL_RANK=str(spec.local_rank),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_WORLD_SIZE=str(spec.ranks_on_host),
        MASTER_ADDR=spec.master_addr,
        MASTER_PORT=str(spec.master_port),
    )
