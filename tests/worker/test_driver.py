"""The driver over real rings: tokens arrive, and every way a rank can fail names the rank."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from msgspec import structs
from sim_worker import SimReplica, expected_outputs, make_add, make_scheduler

from lockstep.comm.codec import decode_plan, encode
from lockstep.comm.errors import CommError, PeerLost, RankMismatch
from lockstep.comm.messages import StepPlan, StepResult, TokenDelta, WorkerFailed, unpack_ids
from lockstep.comm.ring import Ring, RingReader, RingWriter
from lockstep.worker.schedule.driver import SchedulerDriver

# Called with (global rank, result) before it is written: may change it, or return None.
Tamper = Callable[[int, StepResult], StepResult | WorkerFailed | None]


class SimRank(threading.Thread):
    """A rank: reads plans from its ring, executes them on a SimReplica, writes results."""

    def __init__(self, rank: int, index: int, tp_rank: int, dp_rank: int) -> None:
        super().__init__(daemon=True)
        self.rank, self.index, self.tp_rank = rank, index, tp_rank
        self.replica = SimReplica(4, 200, dp_rank)
        self.stopped_with: str | None = None

    def attach(self, plans: Ring, reader: int, results: Ring, tamper: Tamper, speaks: bool) -> None:
        self.plans, self.results = RingReader(plans, reader), RingWriter(results)
        self.tamper, self.speaks = tamper, speaks

    def run(self) -> None:
        while True:
            with suppress(CommError):
                data = self.plans.read(5.0)
                if data is None:
                    return
                message = decode_plan(data)
                if not isinstance(message, StepPlan):
                    self.stopped_with = message.reason
                    return
                self.answer(message)

    def answer(self, plan: StepPlan) -> None:
        result = self.replica.execute(plan, self.index)
        told = StepResult(
            result.epoch, result.step_id, result.dp_rank, self.tp_rank, result.counts,
            result.token_ids, captured=result.captured,
        )  # fmt: skip
        tampered = self.tamper(self.rank, told)
        if self.speaks and tampered is not None:
            self.results.write(encode(tampered))


@contextmanager
def running(
    *, tp_size: int = 1, dp_size: int = 1, lockstep: str = "auto", verify: bool = False,
    tamper: Tamper = lambda rank, result: result, step_timeout_s: float = 30.0, **schedule,
) -> Iterator[tuple[SchedulerDriver, list[SimRank], "Runner"]]:  # fmt: skip
    scheduler = make_scheduler(
        tp_size=tp_size, dp_size=dp_size, lockstep=lockstep, verify_agreement=verify, **schedule
    )
    size = dp_size if lockstep == "always" else 1
    width = size * tp_size
    plans = [Ring.create(num_readers=width, capacity_bytes=1 << 16) for _ in range(dp_size // size)]
    results = [Ring.create(num_readers=1, capacity_bytes=1 << 14) for _ in range(dp_size * tp_size)]
    ranks = []
    for rank, ring in enumerate(results):
        dp_rank, tp_rank = divmod(rank, tp_size)
        ranks.append(SimRank(rank, dp_rank % size, tp_rank, dp_rank))
        ranks[-1].attach(plans[rank // width], rank % width, ring, tamper, verify or not tp_rank)
    writers = [RingWriter(ring) for ring in plans]
    readers = [RingReader(ring, 0) for ring in results]
    driver = SchedulerDriver(scheduler, writers, readers, step_timeout_s=step_timeout_s)
    runner = Runner(driver)
    for thread in [*ranks, runner]:
        thread.start()
    yield driver, ranks, runner
    runner.stop.set()
    for thread in [runner, *ranks]:
        thread.join(10)
        assert not thread.is_alive()
    for ring in [*plans, *results]:
        ring.close()


class Runner(threading.Thread):
    def __init__(self, driver: SchedulerDriver) -> None:
        super().__init__(daemon=True)
        self.driver, self.stop = driver, threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.driver.run(self.stop)
        except Exception as error:
            self.error = error


def collect(driver: SchedulerDriver, count: int, timeout_s: float = 20) -> list[TokenDelta]:
    """Deltas until ``count`` requests have ended."""
    deltas, deadline = list[TokenDelta](), time.monotonic() + timeout_s
    while sum(delta.finish_reason is not None for delta in deltas) < count:
        assert time.monotonic() < deadline, deltas
        deltas += driver.poll_deltas(0.1)
    return deltas


def test_an_idle_driver_captures_what_is_still_to_come() -> None:
    shape = {"dp_size": 2, "mode": "FULL_DECODE_ONLY", "capture": "lazy"}
    with running(**shape) as (driver, ranks, runner):
        deadline = time.monotonic() + 20
        wanted = driver.stats().num_late_graphs
        while [len(each.late_graphs) for each in driver.stats().replicas] != [wanted] * 2:
            assert time.monotonic() < deadline, driver.stats()
            time.sleep(0.02)
        assert [rank.replica.captured for rank in ranks] == [[2, 3]] * 2 and wanted == 2
        driver.add(make_add("late", [1, 2], 3, seed=7))
        assert collect(driver, 1)[-1].finish_reason == "length"
    assert runner.error is None


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tp_size": 2, "verify": True},
        {"dp_size": 2, "run_ahead": 0},
        {"dp_size": 2, "lockstep": "always", "tp_size": 2},
    ],
    ids=str,
)
def test_tokens_arrive(shape: dict) -> None:
    with running(**shape) as (driver, ranks, runner):
        adds = {f"r{i}": make_add(f"r{i}", [i, 2, 3], 9, seed=i) for i in range(12)}
        for add in adds.values():
            driver.add(add)
        outputs: dict[str, list[int]] = {req_id: [] for req_id in adds}
        for delta in collect(driver, len(adds)):
            outputs[delta.req_id] += unpack_ids(delta.token_ids)
        assert outputs == {req_id: expected_outputs(add, 9) for req_id, add in adds.items()}
        assert driver.stats().num_finished == {"length": 12}
        assert all(replica.num_running == 0 for replica in driver.stats().replicas)
    assert runner.error is None
    assert [rank.stopped_with for rank in ranks] == ["the scheduler stops"] * len(ranks)


def test_refusal_is_a_delta_and_a_live_id_an_error() -> None:
    with running() as (driver, _, _):
        driver.add(make_add("bad", [1, 500]))
        (delta,) = collect(driver, 1)
        assert delta.finish_reason == "error" and "got 500" in delta.error
        driver.add(make_add("twice", [1], 40))
        with pytest.raises(ValueError, match="'twice' twice"):
            driver.add(make_add("twice", [1]))
        assert len(unpack_ids(b"".join(d.token_ids for d in collect(driver, 1)))) == 40
        driver.add(make_add("bad", [1], 2))
        assert collect(driver, 1)[-1].finish_reason == "length"


def test_abort_from_another_thread() -> None:
    slow = lambda rank, result: (time.sleep(0.005), result)[1]  # noqa: E731
    with running(tamper=slow) as (driver, _, _):
        driver.add(make_add("long", [1], 60))
        driver.add(make_add("other", [2], 5))
        driver.abort("long")
        driver.abort("nobody")
        ends = {d.req_id: d.finish_reason for d in collect(driver, 2) if d.finish_reason}
        assert ends == {"long": "abort", "other": "length"}


def failure(expected: type[Exception], **shape) -> str:
    """Run two requests, want both to end with an error, and return what ``run`` raised."""
    with running(**shape) as (driver, ranks, runner):
        with suppress(CommError):
            driver.add(make_add("a", [1], 60))
            driver.add(make_add("b", [2], 60))
        deltas = list[TokenDelta]()
        with pytest.raises(expected) as caught:
            deadline = time.monotonic() + 15
            while time.monotonic() < deadline:
                deltas += driver.poll_deltas(1)
        ends = {delta.req_id: delta for delta in deltas if delta.finish_reason}
        assert {delta.finish_reason for delta in ends.values()} <= {"error"}
        assert all(str(caught.value) in delta.error for delta in ends.values())
        with pytest.raises(CommError, match="no request is taken any more"):
            driver.add(make_add("late", [1]))
    assert runner.error is caught.value
    return str(caught.value)


def from_step(step_id: int, rank: int, change) -> Tamper:
    def tamper(own: int, result: StepResult):
        return change(result) if own == rank and result.step_id >= step_id else result

    return tamper


def test_a_rank_that_fails_is_named_and_its_traceback_is_for_logs() -> None:
    fail = from_step(3, 1, lambda result: WorkerFailed(1, result.step_id, "boom", "line 7"))
    message = failure(PeerLost, dp_size=2, tamper=fail)
    assert "rank 1 is lost: step 3: boom" in message and "line 7" not in message


def test_a_rank_without_a_result_is_named_with_step_and_mode() -> None:
    hang = from_step(4, 3, lambda result: None)
    started = time.monotonic()
    message = failure(
        PeerLost, tp_size=2, dp_size=2, lockstep="always", verify=True, tamper=hang,
        step_timeout_s=0.5,
    )  # fmt: skip
    assert time.monotonic() - started < 5
    assert "rank 3 is lost: dp_rank 1 tp_rank 1 gave no result of step 4" in message
    message = failure(PeerLost, tamper=from_step(4, 0, lambda r: None), step_timeout_s=0.5)
    assert "dp_rank 0 tp_rank 0 gave no result of step 4 (FULL, 2 tokens padded to 2)" in message


def test_a_rank_that_samples_other_tokens_is_named() -> None:
    other = from_step(
        2,
        1,
        lambda r: StepResult(r.epoch, r.step_id, r.dp_rank, 1, r.counts, b"\1" * len(r.token_ids)),
    )
    message = failure(RankMismatch, tp_size=2, verify=True, tamper=other)
    assert "rank 1 (dp_rank 0 tp_rank 1) sampled other tokens in step 2" in message


def test_a_rank_that_is_gone_while_idle_is_named() -> None:
    with running(dp_size=2) as (driver, ranks, runner):
        driver.add(make_add("a", [1], 3))
        collect(driver, 1)
        ranks[1].results.close()
        with pytest.raises(PeerLost, match="rank 1 is lost: .* has closed the ring"):
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                driver.poll_deltas(0.2)
    assert isinstance(runner.error, PeerLost)
    assert ranks[0].stopped_with is not None and "rank 1 is lost" in ranks[0].stopped_with


def test_a_group_that_hangs_does_not_hold_up_another() -> None:
    hang = from_step(0, 0, lambda result: None)
    with running(dp_size=2, tamper=hang) as (driver, _, _):
        driver.add(make_add("stuck", [1], 5))
        driver.add(make_add("goes on", [2], 30))
        deltas = collect(driver, 1)
        assert {delta.req_id for delta in deltas} == {"goes on"}


def test_idle_driver_rests() -> None:
    with running() as (driver, _, _):
        driver.add(make_add("a", [1], 3))
        collect(driver, 1)
        before = time.thread_time(), time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before[1] < 0.15


def test_an_idle_driver_waits_for_no_result_and_says_nothing(caplog) -> None:
    caplog.set_level("DEBUG", "lockstep")
    with running(tp_size=2, step_timeout_s=0.2) as (driver, _, runner):
        for turn in range(2):
            time.sleep(0.6)
            driver.add(make_add(f"r{turn}", [1], 3))
            assert collect(driver, 1)[-1].finish_reason == "length"
    assert runner.error is None and caplog.records == []


def test_wrong_number_of_rings_is_refused() -> None:
    with pytest.raises(ValueError, match="plan_writers must be one for each of 1"):
        SchedulerDriver(make_scheduler(), [], [])
    with pytest.raises(ValueError, match="result_readers must be one for each of 1 ranks, got 0"):
        SchedulerDriver(make_scheduler(), [None], [])


@pytest.mark.parametrize(("lockstep", "groups"), [("auto", [0, 1]), ("always", [0])])
def test_times_of_steps_are_taken_by_group(lockstep: str, groups: list[int]) -> None:
    def slow(rank: int, result: StepResult) -> StepResult:
        time.sleep(0.01)
        return structs.replace(result, launch_s=0.004)

    with running(dp_size=2, lockstep=lockstep, tamper=slow) as (driver, _, _):
        for index in range(4):
            driver.add(make_add(f"r{index}", [index], 10))
        deltas = collect(driver, 4)
        stats = driver.stats()
    steps = {each.dp_rank: sum(each.step.counts) for each in stats.step_times}
    assert list(steps) == groups and min(steps.values()) >= 10
    for each in stats.step_times:
        assert each.step.total >= 0.01 * steps[each.dp_rank]
        assert sum(each.plan.counts) == steps[each.dp_rank]
        assert sum(each.commit.counts) == steps[each.dp_rank] * (2 // len(groups))
        assert each.launch.total == pytest.approx(0.004 * sum(each.launch.counts))
        assert each.plan.total + each.commit.total < each.step.total
    replicas: dict[int, set[str]] = {}
    for delta in deltas:
        replicas.setdefault(delta.dp_rank, set()).add(delta.req_id)
    assert [len(replicas[dp_rank]) for dp_rank in (0, 1)] == [2, 2]
    assert [sum(each.queue_seconds.counts) for each in stats.replicas] == [2, 2]
