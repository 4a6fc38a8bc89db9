"""The report as a table, a row for each batch of each run."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.table import Table

from lockstep.launcher.bench_decode.numbers import DecodeReport, DecodeRow, DecodeRun
from lockstep.worker.accuracy import Accuracy


class _Column(NamedTuple):
    name: str
    text: Callable[[DecodeRow], str]


_COLUMNS = (
    _Column("batch", lambda row: f"{row.batch}"),
    _Column("ms/step", lambda row: f"{row.step_ms.median:.3f}"),
    _Column("least to most", lambda row: f"{row.step_ms.least:.3f}-{row.step_ms.most:.3f}"),
    _Column("tok/s", lambda row: f"{row.tokens_per_s:.0f}"),
    _Column("floor GB", lambda row: f"{row.floor_bytes / 1e9:.3f}"),
    _Column("floor ms", lambda row: f"{row.floor_ms:.3f}"),
    _Column("share", lambda row: f"{row.share:.1%}"),
    _Column("device p50", lambda row: f"{row.device.step_ms.p50:.3f}" if row.device else "-"),
    _Column("p99 ms", lambda row: f"{row.device.step_ms.p99:.3f}" if row.device else "-"),
    _Column("host p50", lambda row: f"{row.device.host_us.p50:.1f}" if row.device else "-"),
    _Column("p99 us", lambda row: f"{row.device.host_us.p99:.1f}" if row.device else "-"),
    _Column("gate", lambda row: gate_text(row.accuracy) if row.accuracy else "-"),
)


def heading(report: DecodeReport) -> list[str]:
    """What was measured, how, and the ceiling."""
    options, ceiling = report.options, report.ceiling
    by = f"{ceiling.grid} programs" if ceiling.grid else "torch"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return [
        f"{report.model}, {report.dtype}, tp {report.tensor_parallel_size} x "
        f"dp {report.data_parallel_size} on {report.device}; {versions}",
        f"prompt {options['input_len']}, (tokens {options['long_len']} - {options['short_len']}), "
        f"median of {options['repetitions']}",
        f"reads at most {ceiling.bytes_per_s / 1e12:.3f} TB/s "
        f"({ceiling.num_bytes / (1 << 20):.0f} MiB by {by})",
    ]


def report_table(runs: Sequence[DecodeRun]) -> Table:
    """With several runs, each but the first has its ratio to it behind its time."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("ranks as", "graph mode"):
        table.add_column(name)
    compared = ("ratio",) if len(runs) > 1 else ()
    for name in (*(column.name for column in _COLUMNS), *compared):
        table.add_column(name, justify="right")
    for run in runs:
        for row, first in zip(run.rows, runs[0].rows, strict=True):
            ratio = f"{row.step_ms.median / first.step_ms.median:.3f}"
            cells = [column.text(row) for column in _COLUMNS]
            table.add_row(run.launcher, run.graph_mode, *cells, *([ratio] if compared else []))
    return table


def gate_text(found: Accuracy) -> str:
    """Whether it passed, how many of the sure tokens are right, and the error."""
    verdict = "ok" if found.passed else "WRONG"
    return f"{verdict} {found.num_agreed}/{found.num_sure} {found.rms:.1e}"
