"""When the loops launch, wait and publish, with a device that is slow on purpose."""

from collections.abc import Iterator

from lockstep.comm.codec import encode
from lockstep.comm.messages import (
    PlanMessage,
    ReplicaPlan,
    StepAgreement,
    StepPlan,
    StepResult,
    StopWorkers,
)
from lockstep.worker.loops import OverlappedLoop, PlainLoop


def plan(step_id: int, num_steps: int = 1) -> StepPlan:
    return StepPlan(0, step_id, StepAgreement(0, None, [1], 1), [ReplicaPlan(1)], num_steps)


class SlowStep:
    """Done once it has been asked ``patience`` times; waiting for it is noted."""

    def __init__(self, step_id: int, log: list[str], patience: int) -> None:
        self._step_id = step_id
        self._log = log
        self._patience = patience

    def ready(self) -> bool:
        self._patience -= 1
        return self._patience < 0

    def result(self) -> StepResult:
        if self._patience >= 0:
            self._log.append(f"wait {self._step_id}")
        return StepResult(0, self._step_id, 0, 0, b"", b"")


class Script:
    """Plans for a loop, and a log of what it does with them."""

    def __init__(self, *messages: PlanMessage, patience: int = 0) -> None:
        self.log: list[str] = []
        self._data = [encode(message) for message in messages]
        self._patience = patience

    def poll(self) -> bytes | None:
        return self._data.pop(0) if self._data else None

    def read(self, timeout_s: float) -> bytes | None:
        self.log.append("block")
        return self.poll()

    def accepts(self, plan: StepPlan) -> bool:
        return plan.epoch == 0

    def launch(self, plan: StepPlan) -> Iterator[SlowStep]:
        for step_id in range(plan.step_id, plan.step_id + plan.num_steps):
            self.log.append(f"launch {step_id}")
            yield SlowStep(step_id, self.log, self._patience)

    def publish(self, result: StepResult) -> None:
        self.log.append(f"publish {result.step_id}")


def log_of(loop: type, *messages: PlanMessage, patience: int = 0) -> list[str]:
    script = Script(*messages, StopWorkers(0), patience=patience)
    loop(script, script).run()
    return script.log


def test_the_plain_loop_waits_for_each_step() -> None:
    log = log_of(PlainLoop, plan(0), plan(1, num_steps=2), patience=9)
    assert [line for line in log if line != "block"] == [
        "launch 0", "wait 0", "publish 0",
        "launch 1", "wait 1", "publish 1", "launch 2", "wait 2", "publish 2",
    ]  # fmt: skip


def test_the_overlapped_loop_launches_what_is_granted_before_it_waits() -> None:
    log = log_of(OverlappedLoop, plan(0), plan(1), patience=9)
    assert log == [
        "block", "launch 0", "launch 1", "wait 0", "publish 0", "wait 1", "publish 1",
    ]  # fmt: skip


def test_the_overlapped_loop_publishes_in_order_as_soon_as_steps_are_done() -> None:
    log = log_of(OverlappedLoop, plan(0), plan(1), plan(2), patience=1)
    assert [line for line in log if line != "block"] == [
        "launch 0", "launch 1", "publish 0", "launch 2", "publish 1", "wait 2", "publish 2",
    ]  # fmt: skip


def test_with_nothing_in_flight_a_loop_blocks_instead_of_spinning() -> None:
    assert log_of(OverlappedLoop, plan(0), plan(1)) == [
        "block", "launch 0", "publish 0", "block", "launch 1", "publish 1", "block",
    ]  # fmt: skip


def test_plans_of_another_epoch_are_not_launched() -> None:
    stale = StepPlan(3, 0, StepAgreement(0, None, [1], 1), [ReplicaPlan(1)])
    for loop in (PlainLoop, OverlappedLoop):
        log = log_of(loop, stale, plan(0))
        assert log.count("launch 0") == 1
