"""What every rank's process does, whoever started it: device, worker, channels, a sign of life."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

from lockstep.comm.channel import ChannelReader, ChannelWriter, open_reader, open_writer
from lockstep.comm.errors import CommError
from lockstep.comm.messages import DeviceTimes, WorkerReady
from lockstep.launcher.channels import RankChannels
from lockstep.launcher.engine import Progress
from lockstep.launcher.errors import StartError
from lockstep.launcher.gpu import check_seen
from lockstep.launcher.logs import rank_name, setup_logging
from lockstep.parallel.rank_spec import RankSpec
from lockstep.worker.config import WorkerConfig

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from lockstep.parallel.topology import Topology
    from lockstep.worker.loop import Worker

logger = logging.getLogger(__name__)

# NCCL's buffers in /dev/shm; with less it fails later, with an error that names nothing.
NCCL_BYTES_PER_RANK = 32 << 20
# The stage of a rank that is not starting.
IDLE = ""


class RankWorker(Protocol):
    """What a host makes and drives: ``JoinedWorker``, or a double in tests.

    Made from config, spec and the store of the rendezvous (None: join the spec's); that builds
    nothing heavy yet.
    """

    def __init__(self, config: WorkerConfig, spec: RankSpec, store: "Store | None") -> None: ...
    @staticmethod
    def serve_store(config: WorkerConfig, host: str) -> tuple["Store", int]:
        """Rank 0 only: the store of the rendezvous and the port that it is bound to."""
        ...

    def start(self, progress: Progress | None = None) -> WorkerReady: ...
    def run(self, plans: ChannelReader, results: ChannelWriter) -> None: ...
    def close(self) -> None: ...
    def device_times(self) -> DeviceTimes: ...
    @property
    def last_step(self) -> int | None:
        """The step_id of the last step that is done."""
        ...


# Producer: a rank's host. Consumer: the supervisor, and through it the progress display.
class Beat(msgspec.Struct, frozen=True):
    """A sign of life: what the rank is at, and how far."""

    stage: str
    done: int = 0
    total: int = 0
    last_step: int | None = None


class RankHost:
    """One rank. ``start`` and ``run`` are called once each, in this order, from one thread."""

    def __init__(
        self,
        config: WorkerConfig,
        worker_type: type[RankWorker] | None = None,
        store: "Store | None" = None,
        on_progress: Progress | None = None,
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._worker_type = worker_type or JoinedWorker
        self._store = store
        self._worker: RankWorker | None = None
        self._beat = Beat(IDLE)

    def serve_store(self, host: str) -> int:
        """Rank 0 only: bind the store of the rendezvous on a free port, which is returned."""
        self._store, port = self._worker_type.serve_store(self._config, host)
        return port

    def start(self, spec: RankSpec) -> WorkerReady:
        """Build everything; returns once this rank can serve."""
        setup_logging(rank_name(spec))
        claim_device(spec.device)
        self._worker = self._worker_type(self._config, spec, self._store)
        with _failure_logged("start"):
            ready = self._worker.start(self._note)
        self._beat = Beat(IDLE)
        return ready

    def run(self, channels: RankChannels) -> None:
        """Serve plans until the scheduler says stop. Raises what ended it otherwise."""
        assert self._worker is not None, "start comes before run"
        plans = open_reader(channels.plans, channels.reader_index)
        results = open_writer(channels.results)
        try:
            with _failure_logged("serve"):
                self._worker.run(plans, results)
        finally:
            plans.close()
            results.close()
        self._worker.close()

    def beat(self) -> Beat:
        if self._worker is None:
            return self._beat
        return msgspec.structs.replace(self._beat, last_step=self._worker.last_step)

    def device_times(self) -> DeviceTimes:
        """When its last steps ran, if it was told to note that; asked between steps."""
        assert self._worker is not None, "start comes before device_times"
        return self._worker.device_times()

    def _note(self, stage: str, done: int, total: int) -> None:
        self._beat = Beat(stage, done, total)
        if self._on_progress is not None:
            self._on_progress(stage, done, total)


@contextmanager
def _failure_logged(what: str) -> Iterator[None]:
    """A rank's own failure with its traceback; that of another, which is told there, in a line."""
    try:
        yield
    except CommError as error:
        logger.error("could not %s: %s", what, error)
        raise
    except Exception:
        logger.exception("could not %s", what)
        raise


class JoinedWorker:
    """The real thing: a ``Worker`` and the groups that it is a member of. Imports torch late."""

    @staticmethod
    def serve_store(config: WorkerConfig, host: str) -> tuple["Store", int]:
        from lockstep.comm.rendezvous import serve_store

        return serve_store(host, config.parallel.world_size, config.parallel.timeout_s)

    def __init__(self, config: WorkerConfig, spec: RankSpec, store: "Store | None") -> None:
        self._config = config
        self._spec = spec
        self._store = store
        self._topology: Topology | None = None
        self._worker: Worker | None = None

    def start(self, progress: Progress | None = None) -> WorkerReady:
        from lockstep.comm.rendezvous import preflight_shared_memory
        from lockstep.parallel.topology import Topology
        from lockstep.worker.loop import Worker

        config = self._config
        if self._spec.device != "cpu" and self._spec.world_size > 1:
            preflight_shared_memory(self._spec.ranks_on_host * NCCL_BYTES_PER_RANK)
        self._topology = Topology.create(
            self._spec, config.parallel, store=self._store, all_reduce=config.all_reduce
        )
        self._worker = Worker(config, self._spec, self._topology)
        return self._worker.start(progress)

    def run(self, plans: ChannelReader, results: ChannelWriter) -> None:
        assert self._worker is not None, "start comes before run"
        self._worker.run(plans, results)

    def device_times(self) -> DeviceTimes:
        assert self._worker is not None, "start comes before device_times"
        return self._worker.device_times()

    @property
    def last_step(self) -> int | None:
        return self._worker.metrics.last_step_id if self._worker is not None else None

    def close(self) -> None:
        # Graphs hold operations of the groups, so they go first.
        if self._worker is not None:
            self._worker.close()
        if self._topology is not None:
            self._topology.destroy()


def claim_device(device: str) -> None:
    """Make ``device`` current in this thread, before anything else touches CUDA.

    Raises:
        StartError: this process does not see such a device.
    """
    if device == "cpu":
        return
    import torch

    index = int(device.removeprefix("cuda:"))
    try:
        check_seen(index)
    except ValueError as error:
        raise StartError(str(error)) from None
    torch.cuda.set_device(index)
