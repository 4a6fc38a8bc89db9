"""Where the time of the steps of a lockstep group goes, as histograms of seconds."""

import msgspec

from lockstep.worker.schedule.histogram import Histogram, empty_histogram

_STEP_S = (
    0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02,
    0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0,
)  # fmt: skip
_HOST_S = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02,
    0.05, 0.1, 0.5,
)  # fmt: skip


class StepTimes(msgspec.Struct):
    """Of the lockstep group whose first replica is ``dp_rank``.

    ``step`` is how long each step was the oldest in flight: in steady state what a token takes.
    Host work beside it: the scheduler's to ``plan`` and to ``commit`` a step, and the first
    rank's of each replica to ``launch`` it.
    """

    dp_rank: int
    step: Histogram
    plan: Histogram
    commit: Histogram
    launch: Histogram


def no_step_times(dp_rank: int) -> StepTimes:
    """Before the first step."""
    host = [empty_histogram(_HOST_S) for _ in range(3)]
    return StepTimes(dp_rank, empty_histogram(_STEP_S), *host)
