"""Sizes fitted to a histogram of batches, and what they gain over the standard grid."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lockstep.launcher.files import check_readable
from lockstep.launcher.plan_graphs import PlannedGraphs, with_sizes
from lockstep.launcher.plan_options import PlanOptions
from lockstep.worker.graphs.dispatch import Dispatcher
from lockstep.worker.graphs.fit import fit_sizes
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.graphs.padding import likely_batch, pad

_SIZE = re.compile(r"[1-9]\d*", re.ASCII)


class Cost(msgspec.Struct, frozen=True):
    """Padding of all counted steps over some sizes."""

    num_sizes: int
    wasted_tokens: int
    waste_percent: float


class FitReport(msgspec.Struct, frozen=True):
    """``eager_steps`` have no graph in the standard grid either; they are not fitted to."""

    sizes: tuple[int, ...]
    standard: Cost
    fitted: Cost
    steps: int
    eager_steps: int
    flag: str
    warnings: tuple[str, ...]


def fit_report(options: PlanOptions, planned: PlannedGraphs) -> FitReport | None:
    """The fit that ``--histogram`` asks for.

    Raises:
        ValueError: the file is no histogram, or a graph serves none of its batches.
    """
    if options.histogram is None:
        return None
    histogram = read_histogram(Path(options.histogram))
    standard = planned.dispatcher
    served = {count: steps for count, steps in histogram.items() if _is_served(count, standard)}
    if not served:
        mode = planned.resolved.mode
        raise ValueError(f"histogram {options.histogram}: {mode} serves none of its batches")
    num_sizes = len(standard.grid.capture_sizes)
    sizes = fit_sizes(served, options.max_graphs or num_sizes)
    fitted = with_sizes(options, planned.resolved.mode, sizes)
    return FitReport(
        sizes=sizes,
        standard=_cost(served, standard),
        fitted=_cost(served, fitted),
        steps=sum(served.values()),
        eager_steps=sum(histogram.values()) - sum(served.values()),
        flag=f"--cudagraph-capture-sizes {' '.join(map(str, sizes))}",
        warnings=(*_taken_for_decode(standard), *fitted.warnings),
    )


def _taken_for_decode(dispatcher: Dispatcher) -> Iterator[str]:
    """That sizes of batches do not tell their kind, where that decides which have a graph."""
    mode, grid = dispatcher.mode, dispatcher.grid
    if mode.mixed is RunMode.EAGER:
        yield (
            f"a histogram does not tell mixed batches, which {mode} runs eagerly, from decode "
            f"batches: all of up to {grid.max_num_seqs * grid.query_len} tokens are taken for these"
        )


def read_histogram(path: Path) -> dict[int, int]:
    """``{num_tokens: steps}`` of a JSON file; sizes that never came are left out.

    Raises:
        ValueError: it cannot be read, counts no step, or holds anything else.
    """
    found = _read_object(path)
    for num_tokens, steps in found.items():
        if _SIZE.fullmatch(num_tokens) is None or type(steps) is not int or steps < 0:
            raise ValueError(
                f"histogram {path}: it must count steps (0 or more) of batches of 1 token or "
                f"more, got {num_tokens}: {steps}"
            )
    counted = {int(num_tokens): steps for num_tokens, steps in found.items() if steps}
    if not counted:
        raise ValueError(f"histogram {path}: it counts no step")
    return counted


def _read_object(path: Path) -> dict[str, Any]:
    check_readable("--histogram", path)
    try:
        data = path.read_bytes()
        if not data.strip():
            raise ValueError(f"histogram {path}: the file is empty")
        return msgspec.json.decode(data, type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"histogram {path}: {error}") from None


def _is_served(num_tokens: int, dispatcher: Dispatcher) -> bool:
    padded = pad(dispatcher, likely_batch(num_tokens, dispatcher.grid))
    return padded.run_mode is not RunMode.EAGER


def _cost(histogram: dict[int, int], dispatcher: Dispatcher) -> Cost:
    wasted = computed = 0
    for num_tokens, steps in histogram.items():
        padded = pad(dispatcher, likely_batch(num_tokens, dispatcher.grid))
        wasted += steps * padded.wasted_tokens
        computed += steps * padded.descriptor.num_tokens
    return Cost(len(dispatcher.grid.capture_sizes), wasted, wasted / computed * 100)
