"""How a report begins, is written and is printed: its setup, its JSON, its table."""

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, NamedTuple

import msgspec
from msgspec import structs
from rich.table import Table

from lockstep.launcher.bench_engine.numbers import BenchRun, DeviceNumbers, Row, Setup, Spread
from lockstep.launcher.bench_engine.options import EngineBenchOptions
from lockstep.launcher.consoles import open_console
from lockstep.launcher.resolve import Resolved

_PACKAGES = ("lockstep-decode", "torch", "triton", "ray")


class Column(NamedTuple, Generic[Row]):
    """Of a table: what stands above it and in it."""

    name: str
    text: Callable[[Row], str]


def setup_of(
    resolved: Resolved, device: str, options: EngineBenchOptions, engine: dict[str, Any]
) -> Setup:
    """Of what is measured; ``device`` is the device's name."""
    parallel = resolved.worker.parallel
    return Setup(
        model=Path(resolved.launch.model).name,
        dtype=resolved.worker.dtype,
        device=device,
        versions=_versions(),
        tensor_parallel_size=parallel.tp_size,
        data_parallel_size=parallel.dp_size,
        options=structs.asdict(options),
        engine=engine,
    )


def show(report: object, json: str | None, lines: Sequence[str], table: Table) -> None:
    """Write all of ``report`` to the file that is asked for, and print the rest."""
    if json is not None:
        Path(json).write_bytes(msgspec.json.encode(report) + b"\n")
    console = open_console()
    for line in lines:
        console.print(line)
    console.print(table)


def setup_line(setup: Setup) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in setup.versions.items())
    return (
        f"{setup.model}, {setup.dtype}, tp {setup.tensor_parallel_size} x "
        f"dp {setup.data_parallel_size} on {setup.device}; {versions}"
    )


def runs_table(
    runs: Sequence[BenchRun[Row]], columns: Sequence[Column[Row]], ms: Callable[[Row], Spread]
) -> Table:
    """A row for each of each run. With several runs, each row ends with its ratio to the first.

    A line below says if a time is not above zero.
    """
    table = Table(
        box=None, header_style="bold", pad_edge=False,
        caption=_doubt(runs, ms), caption_justify="left",
    )  # fmt: skip
    for name in ("ranks as", "graph mode"):
        table.add_column(name)
    compared = ("ratio",) if len(runs) > 1 else ()
    for name in (*(column.name for column in columns), *compared):
        table.add_column(name, justify="right")
    for run in runs:
        for row, first in zip(run.rows, runs[0].rows, strict=True):
            ratio = f"{ms(row).median / ms(first).median:.3f}"
            cells = [column.text(row) for column in columns]
            table.add_row(run.launcher, run.graph_mode, *cells, *([ratio] if compared else []))
    return table


def _doubt(runs: Sequence[BenchRun[Row]], ms: Callable[[Row], Spread]) -> str | None:
    least = min(ms(row).least for run in runs for row in run.rows)
    if least > 0:
        return None
    return f"not to be trusted: a repetition took {least:.3f} ms, so noise is larger than a step"


def device_text(device: DeviceNumbers | None, text: Callable[[DeviceNumbers], str]) -> str:
    """ "-" where no times were noted."""
    return text(device) if device else "-"


def _versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = dict[str, str]()
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
