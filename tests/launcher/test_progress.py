"""What a log and a person see of a start-up."""

import io

import pytest
from rich.console import Console

from lockstep.launcher import progress
from lockstep.launcher.progress import StageBars, StageLines


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_log_gets_a_line_at_both_ends_of_a_stage_and_now_and_then(clock: Clock) -> None:
    stream = io.StringIO()
    with StageLines(stream) as stages:
        stages("weights", 0, 200)
        for done, now in ((10, 4.0), (50, 11.0), (60, 12.0), (150, 25.0), (200, 40.0)):
            clock.now = now
            stages("weights", done, 200)
        stages("capture", 0, 0)
        clock.now = 52.5
        stages("capture", 0, 0)
        clock.now = 53.0
    assert stream.getvalue().splitlines() == [
        "lockstep: weights ...",
        "lockstep: weights: 25%",
        "lockstep: weights: 75%",
        "lockstep: weights: 40.0 s",
        "lockstep: capture ...",
        "lockstep: capture: 12 s",
        "lockstep: capture: 13.0 s",
    ]


def test_a_stage_that_fails_is_not_reported_as_done(clock: Clock) -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), StageLines(stream) as stages:
        stages("weights", 0, 200)
        raise RuntimeError
    assert stream.getvalue() == "lockstep: weights ...\n"


def test_a_person_gets_a_bar_a_stage() -> None:
    stream = io.StringIO()
    with StageBars(Console(file=stream, force_terminal=True, width=80)) as stages:
        stages("weights", 3, 4)
        stages("capture", 0, 0)
    shown = stream.getvalue()
    assert "weights" in shown
    assert "capture" in shown
