"""What is measured, as it is written to ``--json``."""

import msgspec

from lockstep.launcher.bench_engine.numbers import BenchRun, DeviceNumbers, Setup, Spread
from lockstep.worker.accuracy import Accuracy
from lockstep.worker.ceiling import Ceiling


class DecodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. ``step_ms`` is by the clock of the front end, from delivered tokens.

    ``floor_bytes`` is what a rank must read in a step, ``floor_ms`` that at the ceiling, ``share``
    how much of the ceiling a step reached. ``device`` and ``accuracy`` are None if not asked for.
    """

    batch: int
    step_ms: Spread
    tokens_per_s: float
    floor_bytes: int
    floor_ms: float
    share: float
    device: DeviceNumbers | None = None
    accuracy: Accuracy | None = None


DecodeRun = BenchRun[DecodeRow]


class DecodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything."""

    setup: Setup
    ceiling: Ceiling
    runs: list[DecodeRun]

    @property
    def passed(self) -> bool:
        """Whether no answer of any row differs from its model."""
        judged = [row.accuracy for run in self.runs for row in run.rows if row.accuracy]
        return all(each.passed for each in judged)
