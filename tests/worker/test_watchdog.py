"""A hanging step is named in time; one that ends is not."""

import time

import pytest

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
