"""How a rank goes from plan to plan: one step at a time, or with launches ahead of results."""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from lockstep.comm.codec import decode_plan
from lockstep.comm.messages import StepPlan, StepResult
from lockstep.worker.results import Pending

_READ_TIMEOUT_S = 1.0


class PlanSource(Protocol):
    """A ``RingReader`` of plans."""

    def poll(self) -> bytes | None: ...

    def read(self, timeout_s: float) -> bytes | None: ...


class StepExecutor(Protocol):
    """What a loop drives: a Worker."""

    def accepts(self, plan: StepPlan) -> bool:
        """False for a plan of another epoch, which is dropped."""
        ...

    def launch(self, plan: StepPlan) -> Iterator[Pending]: ...

    def publish(self, result: StepResult) -> None: ...


class PlainLoop:
    """Launch, wait, publish. Slow and easy to follow: the oracle of the overlapped loop."""

    def __init__(self, plans: PlanSource, executor: StepExecutor) -> None:
        self._plans = plans
        self._executor = executor

    def run(self) -> None:
        """Return when the scheduler says stop."""
        while True:
            data = self._plans.read(_READ_TIMEOUT_S)
            if data is None:
                continue
            plan = decode_plan(data)
            if not isinstance(plan, StepPlan):
                return
            if self._executor.accepts(plan):
                for pending in self._executor.launch(plan):
                    self._executor.publish(pending.result())


class OverlappedLoop:
    """Launch what is granted first, then publish what has finished, in order.

    It never decides to launch by itself: only plans grant steps, so all ranks launch the same.
    """

    def __init__(self, plans: PlanSource, executor: StepExecutor) -> None:
        self._plans = plans
        self._executor = executor
        self._pending: deque[Pending] = deque()

    def run(self) -> None:
        """Return when the scheduler says stop and every launched step is published."""
        while True:
            data = self._next()
            if data is None:
                self._publish_ready()
                continue
            plan = decode_plan(data)
            if not isinstance(plan, StepPlan):
                return self._drain()
            if self._executor.accepts(plan):
                for pending in self._executor.launch(plan):
                    self._pending.append(pending)
                    self._publish_ready()

    def _next(self) -> bytes | None:
        return self._plans.poll() if self._pending else self._plans.read(_READ_TIMEOUT_S)

    def _publish_ready(self) -> None:
        while self._pending and self._pending[0].ready():
            self._executor.publish(self._pending.popleft().result())

    def _drain(self) -> None:
        while self._pending:
            self._executor.publish(self._pending.popleft().result())
