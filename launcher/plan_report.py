"""What ``lockstep plan`` found out, as one object to print as JSON or as text."""

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from lockstep.launcher.flags import with_flags
from lockstep.launcher.plan_fit import FitReport, fit_report
from lockstep.launcher.plan_graphs import PlannedGraphs, batch_of
from lockstep.launcher.plan_model import ModelReport, model_report
from lockstep.launcher.plan_options import PlanOptions
from lockstep.launcher.step_limits import check_token_each
from lockstep.worker.graphs.grid import Grid
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.graphs.padding import Padded, pad


class ModeReport(msgspec.Struct, frozen=True):
    requested: str
    resolved: str
    reasons: tuple[str, ...]


class GraphCounts(msgspec.Struct, frozen=True):
    full: int
    piecewise: int


class BatchReport(msgspec.Struct, frozen=True):
    """``num_active_loras`` is the count that the graph was captured for."""

    num_tokens: int
    num_reqs: int
    uniform_query_len: int
    num_active_loras: int
    run_mode: str
    num_tokens_padded: int
    num_reqs_padded: int | None
    wasted_tokens: int
    waste_percent: float


class PlanReport(msgspec.Struct, frozen=True):
    capture_sizes: tuple[int, ...]
    decode_sizes: tuple[int, ...]
    max_capture_size: int
    cudagraph_mode: ModeReport
    graphs: GraphCounts
    batch: BatchReport | None
    warnings: tuple[str, ...]
    fit: FitReport | UnsetType = UNSET
    model: ModelReport | UnsetType = UNSET


def make_report(options: PlanOptions, planned: PlannedGraphs) -> PlanReport:
    """Raises ValueError for batches, files and models that cannot be."""
    dispatcher = planned.dispatcher
    batch = batch_of(options, dispatcher.grid)
    return PlanReport(
        capture_sizes=dispatcher.grid.capture_sizes,
        decode_sizes=dispatcher.grid.decode_sizes,
        max_capture_size=dispatcher.grid.max_capture_size,
        cudagraph_mode=ModeReport(
            planned.requested, planned.resolved.mode, planned.resolved.reasons
        ),
        graphs=GraphCounts(
            len(dispatcher.descriptors(RunMode.FULL)),
            len(dispatcher.descriptors(RunMode.PIECEWISE)),
        ),
        batch=_batch_report(pad(dispatcher, batch)) if batch else None,
        warnings=(*_refusals(dispatcher.grid), *dispatcher.warnings),
        fit=fit_report(options, planned) or UNSET,
        model=model_report(options, batch.num_reqs if batch else None) or UNSET,
    )


def _refusals(grid: Grid) -> Iterator[str]:
    """Why no engine takes the limits of a grid, which stands by itself all the same."""
    try:
        check_token_each(grid.max_num_seqs, grid.max_num_batched_tokens)
    except ValueError as error:
        yield f"an engine refuses these limits: {with_flags(str(error), PlanOptions)}"


def _batch_report(padded: Padded) -> BatchReport:
    batch, descriptor = padded.batch, padded.descriptor
    return BatchReport(
        num_tokens=batch.num_tokens,
        num_reqs=batch.num_reqs,
        uniform_query_len=batch.uniform_query_len,
        num_active_loras=descriptor.num_active_loras,
        run_mode=padded.run_mode.name,
        num_tokens_padded=descriptor.num_tokens,
        num_reqs_padded=descriptor.num_reqs,
        wasted_tokens=padded.wasted_tokens,
        waste_percent=padded.waste_percent,
    )
