"""What stands between a loop and a Worker while it serves: epoch, watchdog, results, last words."""

import logging
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from lockstep.comm.codec import encode
from lockstep.comm.messages import StepPlan, StepResult, WorkerFailed
from lockstep.worker.results import Pending
from lockstep.worker.step_text import step_text
from lockstep.worker.watchdog import StepWatchdog

if TYPE_CHECKING:
    from lockstep.worker.loop import Worker

logger = logging.getLogger(__name__)


class ResultSink(Protocol):
    """A ``RingWriter`` of results."""

    def write(self, data: bytes, timeout_s: float = 10.0) -> None: ...


class Serving:
    """The ``StepExecutor`` of a Worker. As a context it reports the error that ends serving."""

    def __init__(self, worker: "Worker", results: ResultSink) -> None:
        parallel = worker.config.parallel
        self._worker = worker
        self._spec = worker.spec
        self._results = results
        # tp_rank 0 speaks for its replica; to compare ranks, all of them must speak.
        self._publishes = self._spec.tp_rank == 0 or parallel.verify_agreement
        self._watchdog = StepWatchdog(parallel.timeout_s, self._die)
        self._step_id = -1
        # Of launched steps whose result is not published; results are published in order.
        self._launch_s = deque[float]()

    def accepts(self, plan: StepPlan) -> bool:
        """False for a plan of another life of the lockstep group."""
        if plan.epoch == self._spec.epoch:
            return True
        self._worker.metrics.num_dropped_plans += 1
        logger.warning("dropped a plan of epoch %d, now %d", plan.epoch, self._spec.epoch)
        return False

    def launch(self, plan: StepPlan) -> Iterator[Pending]:
        self._step_id = plan.step_id
        what = step_text(plan.agreement, plan.capture)
        self._watchdog.begin(plan.step_id, what)
        began = time.perf_counter()
        for pending in self._worker.launch(plan):
            self._launch_s.append(time.perf_counter() - began)
            self._watchdog.begin(pending.identity.step_id, what)
            yield pending
            began = time.perf_counter()

    def publish(self, result: StepResult) -> None:
        self._watchdog.end(result.step_id)
        self._worker.metrics.published(result)
        launch_s = self._launch_s.popleft()
        if self._publishes:
            self._results.write(encode(structs.replace(result, launch_s=launch_s)))

    def __enter__(self) -> "Serving":
        self._watchdog.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._watchdog.__exit__(kind, error, trace)
        if isinstance(error, Exception):
            self._report(str(error) or type(error).__name__, "".join(traceback.format_exc()))

    def _report(self, error: str, trace: str) -> None:
        failed = WorkerFailed(self._spec.global_rank, self._step_id, error, trace)
        try:
            self._results.write(encode(failed))
        except Exception:
            logger.exception("rank %d could not report its failure", self._spec.global_rank)

    def _die(self, overdue: str) -> None:
        """Called by the watchdog while the main thread is stuck, so the ring is free to use."""
        logger.error("rank %d: %s", self._spec.global_rank, overdue)
        self._report(overdue, "")
        os.kill(os.getpid(), signal.SIGKILL)
