"""A hanging step is named in time; one that ends is not."""

import logging
import os
import signal
import time
from types import SimpleNamespace

import pytest
from rig import full

from lockstep.comm.codec import decode_result
from lockstep.comm.messages import ReplicaPlan, StepResult, WorkerFailed
from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.rank_spec import RankSpec
from lockstep.worker.metrics import WorkerMetrics
from lockstep.worker.serving import Serving
from lockstep.worker.watchdog import StepWatchdog


def said_within(seconds: float, said: list[str]) -> bool:
    deadline = time.monotonic() + seconds
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(said)


def test_a_step_that_hangs_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with StepWatchdog(0.2, said.append) as watchdog:
        watchdog.begin(6, "FULL, 3 tokens padded to 4")
        watchdog.end(6)
        watchdog.begin(7, "FULL, 3 tokens padded to 4")
        assert said_within(5, said)
        time.sleep(0.3)
    assert len(said) == 1
    assert said[0].startswith("step 7 (FULL, 3 tokens padded to 4) is not done after ")
    assert "test_a_step_that_hangs_is_named" in capfd.readouterr().err


def test_steps_that_end_in_time_are_not_mentioned() -> None:
    said: list[str] = []
    with StepWatchdog(0.3, said.append) as watchdog:
        for step_id in range(20):
            watchdog.begin(step_id, "EAGER")
            time.sleep(0.03)
            watchdog.end(step_id)
    assert said == []


class Rank3:
    """A worker whose steps are launched and then never done."""

    config = SimpleNamespace(parallel=ParallelConfig(tp_size=4, timeout_s=0.2))
    spec = RankSpec(global_rank=3, world_size=4, dp_rank=0, tp_rank=3)
    replica_index = 0

    def __init__(self) -> None:
        self.metrics = WorkerMetrics()

    def launch(self, plan):
        yield SimpleNamespace(identity=SimpleNamespace(step_id=plan.step_id))


class Sink(list):
    def write(self, data: bytes, timeout_s: float = 10.0) -> None:
        self.append(decode_result(data))


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: made.append((pid, number)))
    return made


def test_the_line_of_a_hanging_step_names_rank_step_mode_and_size(
    killed: list, caplog: pytest.LogCaptureFixture
) -> None:
    results = Sink()
    with Serving(Rank3(), results) as serving:
        [_] = serving.launch(full(7, ReplicaPlan(3), 4))
        assert said_within(5, killed)
    assert killed == [(os.getpid(), signal.SIGKILL)]
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("rank 3: step 7 (FULL, 4 tokens padded to 4) is not done after 0.")
    [failed] = results
    assert isinstance(failed, WorkerFailed) and (failed.global_rank, failed.step_id) == (3, 7)


def test_an_idle_rank_says_nothing(killed: list, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "lockstep")
    with Serving(Rank3(), Sink()) as serving:
        time.sleep(0.7)
        [_] = serving.launch(full(0, ReplicaPlan(3), 4))
        serving.publish(StepResult(0, 0, 0, 3, b"", b""))
        time.sleep(0.7)
    assert killed == [] and caplog.records == []


def test_a_result_tells_what_the_host_took_to_launch_its_step() -> None:
    class Slow(Rank3):
        config = SimpleNamespace(parallel=ParallelConfig(tp_size=4, timeout_s=20.0))
        spec = RankSpec(global_rank=0, world_size=4, dp_rank=0, tp_rank=0)

        def launch(self, plan):
            time.sleep(0.02)
            yield from super().launch(plan)

    results = Sink()
    with Serving(Slow(), results) as serving:
        [_] = serving.launch(full(0, ReplicaPlan(3), 4))
        time.sleep(0.3)
        serving.publish(StepResult(0, 0, 0, 0, b"", b""))
    (result,) = results
    assert 0.02 <= result.launch_s < 0.3
