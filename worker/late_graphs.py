"""The graphs that a rank captures while it serves, each when a plan orders it."""

import logging

from lockstep.comm.messages import GraphCost, StepPlan
from lockstep.parallel.rank_spec import RankSpec
from lockstep.worker.graphs.dispatch import BatchDescriptor, Dispatcher
from lockstep.worker.graphs.manifest import Manifest
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.results import PendingCapture, StepIdentity
from lockstep.worker.workbench import Workbench

logger = logging.getLogger(__name__)

_MIB = 1 << 20


class LateGraphs:
    """Carries out orders; what exists decides what ``dispatch`` answers, as for the scheduler.

    Args:
        reserve_bytes: device memory that was left free for all of them together.
    """

    def __init__(
        self,
        bench: Workbench,
        spec: RankSpec,
        dispatcher: Dispatcher,
        manifest: Manifest,
        reserve_bytes: int,
    ) -> None:
        self._bench = bench
        self._spec = spec
        self._whole = dispatcher
        self._manifest = manifest
        self._reserve_bytes = reserve_bytes
        self._costs: list[GraphCost] = []
        self._dispatcher = self._existing()

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform_query_len: int,
        num_active_loras: int,
        max_mode: int,
    ) -> tuple[RunMode, BatchDescriptor]:
        """``Dispatcher.dispatch`` over the graphs that exist now."""
        batch = num_tokens, num_reqs, uniform_query_len, num_active_loras
        return self._dispatcher.dispatch(*batch, max_mode)

    def capture(self, plan: StepPlan, position: int) -> PendingCapture:
        """Capture the graph at ``position`` of the manifest, together with all ranks of the group.

        Raises:
            GraphError: it is not the next one, or differs from its step.
            CaptureFailed: capturing raised; peers are told.
            CommError: ranks differ, or one is lost.
        """
        cost = self._bench.capture_next(position)
        self._costs.append(cost)
        self._dispatcher = self._existing()
        if len(self._costs) == self._manifest.num_late:
            self._compare_with_reserve()
        spec = self._spec
        identity = StepIdentity(plan.epoch, plan.step_id, spec.dp_rank, spec.tp_rank, 0, 0)
        return PendingCapture(identity, cost)

    def _existing(self) -> Dispatcher:
        return self._whole.only(self._bench.parts.graphs.descriptors)

    def _compare_with_reserve(self) -> None:
        taken = sum(cost.num_bytes for cost in self._costs)
        level = logging.INFO if taken <= self._reserve_bytes else logging.WARNING
        logger.log(
            level,
            "the %d graphs captured while serving took %.1f MiB of %.1f left free for them",
            len(self._costs),
            taken / _MIB,
            self._reserve_bytes / _MIB,
        )
