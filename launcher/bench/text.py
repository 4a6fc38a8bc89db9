"""Runs as a table: one beside the other, each with its ratio to the first."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.table import Table

from lockstep.launcher.bench.metrics import Summary
from lockstep.launcher.bench.saved import Run


class _Row(NamedTuple):
    name: str
    value: Callable[[Summary], float]
    digits: int = 2
    compared: bool = True


_ROWS = (
    _Row("completed requests", lambda s: s.num_completed, 0, False),
    _Row("failed requests", lambda s: s.num_failed, 0, False),
    _Row("duration (s)", lambda s: s.duration_s, 2, False),
    _Row("generator's CPU (%)", lambda s: 100 * s.cpu_share, 0, False),
    _Row("prompt tokens", lambda s: s.num_prompt_tokens, 0, False),
    _Row("output tokens", lambda s: s.num_output_tokens, 0, False),
    _Row("requests/s", lambda s: s.requests_per_s),
    _Row("output tok/s", lambda s: s.output_tokens_per_s),
    _Row("total tok/s", lambda s: s.total_tokens_per_s),
    _Row("mean TTFT (ms)", lambda s: s.ttft_ms.mean),
    _Row("median TTFT (ms)", lambda s: s.ttft_ms.median),
    _Row("P99 TTFT (ms)", lambda s: s.ttft_ms.p99),
    _Row("mean TPOT (ms)", lambda s: s.tpot_ms.mean),
    _Row("median TPOT (ms)", lambda s: s.tpot_ms.median),
    _Row("P99 TPOT (ms)", lambda s: s.tpot_ms.p99),
    _Row("mean ITL (ms)", lambda s: s.itl_ms.mean),
    _Row("median ITL (ms)", lambda s: s.itl_ms.median),
    _Row("P99 ITL (ms)", lambda s: s.itl_ms.p99),
)


def run_table(runs: Sequence[Run]) -> Table:
    """One column a run; all but the first have their ratio to it behind them."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for index, run in enumerate(runs):
        table.add_column(run.label, justify="right")
        if index:
            table.add_column("ratio", justify="right")
    for row in _ROWS:
        table.add_row(row.name, *_cells(row, [run.summary for run in runs]))
    return table


def _cells(row: _Row, summaries: Sequence[Summary]) -> list[str]:
    first, *others = [row.value(summary) for summary in summaries]
    cells = [f"{first:.{row.digits}f}"]
    for value in others:
        ratio = f"{value / first:.3f}" if row.compared and first else ""
        cells += [f"{value:.{row.digits}f}", ratio]
    return cells


def failures(run: Run) -> list[str]:
    """Each kind of failure with its count, the most frequent first."""
    errors = [record.error for record in run.requests if record.error]
    kinds = sorted({*errors}, key=errors.count, reverse=True)
    return [f"{errors.count(kind)} failed: {kind}" for kind in kinds]
