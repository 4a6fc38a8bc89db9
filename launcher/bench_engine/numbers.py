"""What benchmarks of engines write to ``--json`` alike, and how many values become few."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

Row = TypeVar("Row")


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
    """By the device's clock of each replica's first rank: ``step_ms`` of a step and one wait
    between two, ``host_us`` of that wait, from an end to the next begin, when the device waits for
    the host. ``clock_ns`` is how fine that clock is: all differences are multiples of it."""

    num_steps: int
    clock_ns: int
    step_ms: Quantiles
    host_us: Quantiles


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. ``options`` and ``engine`` are the settings, so that it can be repeated."""

    model: str
    dtype: str
    device: str
    versions: dict[str, str]
    tensor_parallel_size: int
    data_parallel_size: int
    options: dict[str, Any]
    engine: dict[str, Any]


class BenchRun(msgspec.Struct, Generic[Row], frozen=True, kw_only=True):
    """All rows of one start. ``seconds`` are those of its stages and of the first token."""

    launcher: str
    graph_mode: str
    num_graphs: int
    seconds: dict[str, float]
    rows: list[Row]


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(float(np.median(values)), min(values), max(values))


def quantiles(values: Sequence[float]) -> Quantiles:
    """Interpolated between the two nearest of at least one value."""
    p50, p99 = np.percentile(values, (50, 99))
    return Quantiles(float(p50), float(p99))


def ms_of_each(short_s: float, long_s: float, num_more: int) -> float:
    """Milliseconds of each of the steps that the longer one of two takes more."""
    return (long_s - short_s) * 1e3 / num_more
