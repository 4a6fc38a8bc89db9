"""``lockstep plan`` for people: lines, and tables with bars."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UnsetType
from rich.console import Console
from rich.table import Table

from lockstep.launcher.plan_fit import FitReport
from lockstep.launcher.plan_graphs import PlannedGraphs
from lockstep.launcher.plan_model import ModelReport
from lockstep.launcher.plan_report import BatchReport, PlanReport
from lockstep.worker.graphs.dispatch import BatchDescriptor, Dispatcher
from lockstep.worker.graphs.fallback import eager_reason
from lockstep.worker.graphs.manifest import build_manifest
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.graphs.padding import WasteRange, decode_batches, mixed_batches, waste

_PERCENT_PER_MARK = 2.5
_DIGEST_SHOWN = 16


def print_plan(console: Console, report: PlanReport, planned: PlannedGraphs) -> None:
    dispatcher = planned.dispatcher
    for line in [*_summary(report, dispatcher), *_manifest(dispatcher)]:
        console.print(line, soft_wrap=True)
    for table in _waste_tables(dispatcher):
        console.print()
        console.print(table)
    for part in (_batch(report.batch, dispatcher), _fit(report.fit), _model(report.model)):
        if part:
            console.print()
        for line in part:
            console.print(line, soft_wrap=True)


def compact(sizes: Sequence[int]) -> str:
    """ "1 2 4 8..64 by 8": runs of at least four equal steps are shortened."""
    parts, at = list[str](), 0
    while at < len(sizes):
        end = _run_end(sizes, at)
        if end - at >= 3:
            parts.append(f"{sizes[at]}..{sizes[end]} by {abs(sizes[at + 1] - sizes[at])}")
            at = end + 1
        else:
            parts.append(str(sizes[at]))
            at += 1
    return ", ".join(parts)


def _run_end(sizes: Sequence[int], start: int) -> int:
    """Index of the last size that continues the step between the first two."""
    end = min(start + 1, len(sizes) - 1)
    step = sizes[end] - sizes[start]
    while end + 1 < len(sizes) and sizes[end + 1] - sizes[end] == step:
        end += 1
    return end


def _summary(report: PlanReport, dispatcher: Dispatcher) -> Iterator[str]:
    yield f"graph mode    {report.cudagraph_mode.resolved}"
    for reason in report.cudagraph_mode.reasons:
        yield f"              {reason}"
    yield from _sizes(dispatcher)
    for warning in report.warnings:
        yield f"warning       {warning}"


def _sizes(dispatcher: Dispatcher) -> Iterator[str]:
    grid = dispatcher.grid
    if not grid.capture_sizes:
        yield "graphs        none: every step runs eagerly"
        return
    yield f"mixed sizes   {len(grid.capture_sizes)}: {compact(grid.capture_sizes)}"
    yield f"decode sizes  {len(grid.decode_sizes)}: {compact(grid.decode_sizes)}"
    if dispatcher.mode.mixed is RunMode.EAGER:
        yield f"eager         mixed batches: {dispatcher.mode} has no graphs for them"
    elif grid.max_num_batched_tokens > grid.max_capture_size:
        yield f"eager         mixed batches above {grid.max_capture_size} tokens"


def _manifest(dispatcher: Dispatcher) -> Iterator[str]:
    manifest = build_manifest(dispatcher)
    if not manifest.entries:
        return
    digest = manifest.digest()[:_DIGEST_SHOWN]
    count = len(manifest.entries)
    yield f"manifest      {count} entries, digest {digest}..., captured largest first:"
    for run_mode in (RunMode.PIECEWISE, RunMode.FULL):
        yield from _captures(run_mode, dispatcher.descriptors(run_mode))
    if len(dispatcher.lora_cases) > 1:
        cases = ", ".join(map(str, reversed(dispatcher.lora_cases)))
        yield f"              each for {cases} active adapters"


def _captures(run_mode: RunMode, descriptors: Iterable[BatchDescriptor]) -> Iterator[str]:
    by_kind: dict[int, dict[int, None]] = {}
    for each in descriptors:
        by_kind.setdefault(each.uniform_query_len, {})[each.num_tokens] = None
    for query_len, sizes in by_kind.items():
        kind = f"decode, {query_len} a request" if query_len else "mixed"
        if run_mode is RunMode.PIECEWISE:
            kind = "any batch"
        yield f"              {run_mode.name} ({kind}): {compact(list(sizes))}"


def _waste_tables(dispatcher: Dispatcher) -> Iterator[Table]:
    mode, grid = dispatcher.mode, dispatcher.grid
    if mode.decode is not RunMode.EAGER:
        yield _waste_table("decode", waste(dispatcher, decode_batches(grid)))
    if mode.mixed is not RunMode.EAGER:
        yield _waste_table("mixed", waste(dispatcher, mixed_batches(grid)))


def _waste_table(kind: str, ranges: list[WasteRange]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(f"{kind} batches", justify="right")
    table.add_column("padding %", justify="right")
    table.add_column("worst %", justify="right")
    table.add_column("worst case")
    table.add_column("worst", no_wrap=True)
    for each in ranges:
        table.add_row(*_waste_cells(each))
    return table


def _waste_cells(each: WasteRange) -> tuple[str, str, str, str, str]:
    tokens = str(each.first) if each.first == each.last else f"{each.first}-{each.last}"
    worst = each.worst
    if each.num_eager == each.last - each.first + 1:
        return tokens, "", "", "eager", ""
    case = f"{worst.batch.num_tokens} -> {worst.descriptor.num_tokens}"
    bar = "\u2588" * round(worst.waste_percent / _PERCENT_PER_MARK)
    note = f" ({each.num_eager} eager)" if each.num_eager else ""
    return tokens, f"{each.percent:.2f}", f"{worst.waste_percent:.2f}", case + note, bar


def _batch(batch: BatchReport | None, dispatcher: Dispatcher) -> list[str]:
    if batch is None:
        return []
    kind = (
        f"{batch.num_reqs} requests of {batch.uniform_query_len}"
        if batch.uniform_query_len
        else f"mixed, {batch.num_reqs} requests"
    )
    lines = [f"batch         {batch.num_tokens} tokens ({kind}) runs {batch.run_mode}"]
    if batch.run_mode == RunMode.EAGER.name:
        why = eager_reason(
            dispatcher, batch.num_tokens, batch.num_reqs, batch.uniform_query_len,
            batch.num_active_loras,
        )  # fmt: skip
        return [*lines, f"              {why}"]
    return [
        *lines,
        f"              padded to {batch.num_tokens_padded} tokens: {batch.wasted_tokens} wasted, "
        f"{batch.waste_percent:.2f} %",
    ]


def _fit(fit: FitReport | UnsetType) -> list[str]:
    if isinstance(fit, UnsetType):
        return []
    standard, fitted = fit.standard, fit.fitted
    return [
        f"fit           {fit.steps} steps, {fit.eager_steps} more that no graph serves",
        f"              standard grid, {standard.num_sizes} sizes: {standard.wasted_tokens} padded "
        f"tokens, {standard.waste_percent:.2f} % of what is computed",
        f"              fitted, {fitted.num_sizes} sizes: {fitted.wasted_tokens} padded tokens, "
        f"{fitted.waste_percent:.2f} %; {standard.wasted_tokens - fitted.wasted_tokens} fewer",
        *(f"warning       {warning}" for warning in fit.warnings),
        f"use           {fit.flag}",
    ]


def _model(model: ModelReport | UnsetType) -> list[str]:
    if isinstance(model, UnsetType):
        return []
    split = f", {model.tensor_parallel_size} ranks" if model.tensor_parallel_size > 1 else ""
    return [
        f"model         {model.name}{split}: {_gb(model.weight_bytes)} of weights, of which a step "
        f"reads {_gb(model.step_weight_bytes)}; {model.kv_bytes_per_token / 1024:g} KiB of KV a "
        "token, on each rank",
        f"              least time of a decode step on {model.gpu} "
        f"({model.bandwidth_tb_s:g} TB/s by its data sheet), context {model.context_len}:",
        *(
            f"              {step.num_reqs:5d} requests  {_gb(step.step_bytes):>10}"
            f"  {step.floor_ms:9.3f} ms{'' if step.fits else '  does not fit'}"
            for step in model.steps
        ),
    ]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f} GB"
