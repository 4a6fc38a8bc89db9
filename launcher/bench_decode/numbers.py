"""What is measured, as it is written to ``--json``, and how many values become few."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lockstep.worker.accuracy import Accuracy
from lockstep.worker.ceiling import Ceiling


class Spread(msgspec.Struct, frozen=True):
    """Of a few repetitions."""

    median: float
    least: float
    most: float


class Quantiles(msgspec.Struct, frozen=True):
    """Of many steps."""

    p50: float
    p99: float


class DeviceNumbers(msgspec.Struct, frozen=True):
    """By the device's clock of each replica's first rank: ``step_ms`` from one begin to the next,
    ``host_us`` from an end to the next begin, when the device waits for the host. ``clock_ns`` is
    how fine that clock is: all differences are multiples of it."""

    num_steps: int
    clock_ns: int
    step_ms: Quantiles
    host_us: Quantiles


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


class DecodeRun(msgspec.Struct, frozen=True, kw_only=True):
    """All batches of one start. ``seconds`` are those of its stages and of the first token."""

    launcher: str
    graph_mode: str
    num_graphs: int
    seconds: dict[str, float]
    rows: list[DecodeRow]


class DecodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. ``options`` and ``engine`` are the settings, so that it can be repeated."""

    model: str
    dtype: str
    device: str
    versions: dict[str, str]
    tensor_parallel_size: int
    data_parallel_size: int
    options: dict[str, Any]
    engine: dict[str, Any]
    ceiling: Ceiling
    runs: list[DecodeRun]

    @property
    def passed(self) -> bool:
        """Whether no answer of any row differs from its model."""
        judged = [row.accuracy for run in self.runs for row in run.rows if row.accuracy]
        return all(each.passed for each in judged)


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(float(np.median(values)), min(values), max(values))


def quantiles(values: Sequence[float]) -> Quantiles:
    """Interpolated between the two nearest of at least one value."""
    p50, p99 = np.percentile(values, (50, 99))
    return Quantiles(float(p50), float(p99))


def ms_a_step(short_s: float, long_s: float, num_steps: int) -> float:
    """Milliseconds of each of the steps that a longer answer takes more."""
    return (long_s - short_s) * 1e3 / num_steps
