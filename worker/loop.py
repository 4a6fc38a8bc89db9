"""The Worker: one rank's life, from start-up through steps to its end. Plain, without Ray."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import DeviceTimes, StepPlan, StepResult, WorkerReady
from lockstep.parallel.agreement import propose
from lockstep.parallel.collective_agreement import CollectiveAgreement
from lockstep.parallel.rank_spec import RankSpec
from lockstep.parallel.topology import Topology
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.heap import Heap
from lockstep.worker.loops import OverlappedLoop, PlainLoop, PlanSource
from lockstep.worker.metrics import WorkerMetrics
from lockstep.worker.results import Pending
from lockstep.worker.serving import ResultSink, Serving
from lockstep.worker.stages import Progress
from lockstep.worker.start_up import Started, StartUp


class Worker:
    """One rank: StepPlan in, StepResult out. Building it costs nothing; ``start`` does.

    Ray actor, torchrun process and unit test are thin shells around it.
    """

    def __init__(self, config: WorkerConfig, spec: RankSpec, topology: Topology) -> None:
        self.config = config
        self.spec = spec
        self.metrics = WorkerMetrics()
        self.heap = Heap()
        self.replica_index = spec.dp_rank % config.parallel.lockstep_dp_size
        self._topology = topology
        self._started: Started | None = None
        self._agreement: CollectiveAgreement | None = None
        self._next_step: int | None = None

    def start(self, progress: Progress | None = None) -> WorkerReady:
        """Load, warm up, capture, map the KV cache. ``num_blocks`` is the lockstep group's least.

        Args:
            progress: called with (stage, done, total).

        Raises:
            ValueError: the configuration cannot be served; the message has the numbers.
            CommError: ranks disagree, or one is lost.
        """
        self._use_device()
        with self._telling_peers():
            started = StartUp(self.config, self._topology, progress).run()
        self._started = started
        if self.config.parallel.verify_agreement:
            self._agreement = CollectiveAgreement(self._topology.dp, started.late.dispatch)
        self.heap.freeze()
        return started.ready

    def run(self, plans: PlanSource, results: ResultSink) -> None:
        """Serve until the scheduler says stop.

        A failure is written to ``results`` as WorkerFailed and then raised. A step that hangs for
        ``timeout_s`` ends the process: nothing can raise in a stuck collective.
        """
        self._use_device()
        loop = OverlappedLoop if self.config.schedule.async_scheduling else PlainLoop
        with self._telling_peers(), Serving(self, results) as serving:
            loop(plans, serving).run()

    def execute(self, plan: StepPlan) -> list[StepResult]:
        """Take the steps of ``plan`` one after another and wait for each."""
        return [pending.result() for pending in self.launch(plan)]

    def launch(self, plan: StepPlan) -> Iterator[Pending]:
        """Launch the steps of ``plan`` without waiting, one each time the iterator is advanced.

        A plan that orders a graph captures it instead, and gives one result.

        Raises:
            RankMismatch: a step was skipped, or the agreement is not what the ranks agree on.
        """
        if self._started is None:
            raise RuntimeError("start() the worker before its first plan")
        self._take_turn(plan)
        if plan.capture is not None:
            yield self._started.late.capture(plan, plan.capture)
            return
        for pending in self._started.bench.runner.launch(plan):
            self.metrics.launched(plan, self.replica_index)
            yield pending

    def device_times(self) -> DeviceTimes:
        """When its last steps ran, as ``step_timestamps`` says; any thread may ask between steps.

        Raises:
            RuntimeError: it has not started, or notes no times.
        """
        clock = self._started.bench.parts.state.clock if self._started else None
        if clock is None:
            raise RuntimeError("step_timestamps is 0, or the worker has not started")
        self._use_device()
        return clock.read()

    def close(self) -> None:
        """Release graphs, then memory; communicators that graphs hold must live until then."""
        if self._started is not None:
            self._started.bench.release()
            self._started.memory.close()
            self._started = None
            self.heap.thaw()

    @contextmanager
    def _telling_peers(self) -> Iterator[None]:
        """Peers of a rank that fails wait in collectives: wake them with the reason."""
        try:
            yield
        except Exception as error:
            self._topology.give_up(error)
            raise

    def _use_device(self) -> None:
        # The current device belongs to a thread, and kernels launch on the current device.
        if self.spec.device != "cpu":
            torch.cuda.set_device(torch.device(self.spec.device))

    def _take_turn(self, plan: StepPlan) -> None:
        """A skipped step would pair this rank's collectives with those of another step."""
        if self._next_step not in (None, plan.step_id):
            raise RankMismatch(
                f"rank {self.spec.global_rank} got step {plan.step_id}, "
                f"but its next step is {self._next_step}"
            )
        self._next_step = plan.step_id + plan.num_steps
        if self._agreement is not None:
            own = propose(plan.replicas[self.replica_index], max_mode=RunMode.FULL)
            self._agreement.verify(plan.epoch, plan.step_id, own, plan.agreement)
