"""The report as a table, a row for each span of tokens of each run."""

from collections.abc import Sequence

from rich.table import Table

from lockstep.launcher.bench_engine.report import Column, device_text, runs_table, setup_line
from lockstep.launcher.bench_prefill.numbers import PrefillReport, PrefillRow, PrefillRun
from lockstep.worker.gemm_rate import GemmRate

_COLUMNS = (
    Column[PrefillRow]("tokens", lambda row: f"{row.from_len}-{row.to_len}"),
    Column[PrefillRow]("ms/chunk", lambda row: f"{row.chunk_ms.median:.3f}"),
    Column[PrefillRow](
        "least to most", lambda row: f"{row.chunk_ms.least:.3f}-{row.chunk_ms.most:.3f}"
    ),
    Column[PrefillRow]("tok/s", lambda row: f"{row.tokens_per_s:.0f}"),
    Column[PrefillRow]("TFLOP", lambda row: f"{row.flops.total / 1e12:.4g}"),
    Column[PrefillRow]("attention", lambda row: f"{row.flops.attention / row.flops.total:.1%}"),
    Column[PrefillRow]("TFLOP/s", lambda row: f"{row.flops_per_s / 1e12:.4g}"),
    Column[PrefillRow]("share", lambda row: f"{row.share:.1%}"),
    Column[PrefillRow]("linears ms", lambda row: f"{row.linear_ms:.3f}"),
    Column[PrefillRow](
        "device p50", lambda row: device_text(row.device, lambda found: f"{found.step_ms.p50:.3f}")
    ),
    Column[PrefillRow](
        "host p50", lambda row: device_text(row.device, lambda found: f"{found.host_us.p50:.1f}")
    ),
)


def heading(report: PrefillReport) -> list[str]:
    """What was measured, how, and the rate of products."""
    return [
        setup_line(report.setup),
        f"chunks of {report.chunk_size} tokens, (longer prompt - shorter) / chunks, "
        f"median of {report.setup.options['repetitions']}",
        _rate_line(report.gemm),
    ]


def _rate_line(gemm: GemmRate) -> str:
    rates = [f"{name} {each.flops_per_s / 1e12:.4g}" for name, each in gemm.products.items()]
    return f"multiplies at {gemm.flops_per_s / 1e12:.4g} TFLOP/s ({', '.join(rates)}) by torch"


def report_table(runs: Sequence[PrefillRun]) -> Table:
    """With several runs, each row ends with its ratio to the first run's."""
    return runs_table(runs, _COLUMNS, lambda row: row.chunk_ms)
