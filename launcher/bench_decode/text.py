"""The report as a table, a row for each batch of each run."""

from collections.abc import Sequence

from rich.table import Table

from lockstep.launcher.bench_decode.numbers import DecodeReport, DecodeRow, DecodeRun
from lockstep.launcher.bench_engine.report import Column, device_text, runs_table, setup_line
from lockstep.worker.accuracy import Accuracy

_COLUMNS = (
    Column[DecodeRow]("batch", lambda row: f"{row.batch}"),
    Column[DecodeRow]("ms/step", lambda row: f"{row.step_ms.median:.3f}"),
    Column[DecodeRow](
        "least to most", lambda row: f"{row.step_ms.least:.3f}-{row.step_ms.most:.3f}"
    ),
    Column[DecodeRow]("tok/s", lambda row: f"{row.tokens_per_s:.0f}"),
    Column[DecodeRow]("floor GB", lambda row: f"{row.floor_bytes / 1e9:.3f}"),
    Column[DecodeRow]("floor ms", lambda row: f"{row.floor_ms:.3f}"),
    Column[DecodeRow]("share", lambda row: f"{row.share:.1%}"),
    Column[DecodeRow](
        "device p50", lambda row: device_text(row.device, lambda found: f"{found.step_ms.p50:.3f}")
    ),
    Column[DecodeRow](
        "p99 ms", lambda row: device_text(row.device, lambda found: f"{found.step_ms.p99:.3f}")
    ),
    Column[DecodeRow](
        "host p50", lambda row: device_text(row.device, lambda found: f"{found.host_us.p50:.1f}")
    ),
    Column[DecodeRow](
        "p99 us", lambda row: device_text(row.device, lambda found: f"{found.host_us.p99:.1f}")
    ),
    Column[DecodeRow]("gate", lambda row: gate_text(row.accuracy) if row.accuracy else "-"),
)


def heading(report: DecodeReport) -> list[str]:
    """What was measured, how, and the ceiling."""
    options, ceiling = report.setup.options, report.ceiling
    by = f"{ceiling.grid} programs" if ceiling.grid else "torch"
    return [
        setup_line(report.setup),
        f"prompt {options['input_len']}, (tokens {options['long_len']} - {options['short_len']}), "
        f"median of {options['repetitions']}",
        f"reads at most {ceiling.bytes_per_s / 1e12:.3f} TB/s "
        f"({ceiling.num_bytes / (1 << 20):.0f} MiB by {by})",
    ]


def report_table(runs: Sequence[DecodeRun]) -> Table:
    """With several runs, each but the first has its ratio to it behind its time."""
    return runs_table(runs, _COLUMNS, lambda row: row.step_ms)


def gate_text(found: Accuracy) -> str:
    """Whether it passed, how many of the sure tokens are right, and the error."""
    verdict = "ok" if found.passed else "WRONG"
    return f"{verdict} {found.num_agreed}/{found.num_sure} {found.rms:.1e}"
