"""The graphs that the options of ``lockstep plan`` lead to, and the batches that they name."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from lockstep.launcher.plan_options import PlanOptions, capability_of
from lockstep.launcher.step_limits import tokens_in_step
from lockstep.parallel.agreement import NO_STEP, Proposal, agree
from lockstep.worker.attention.registry import find_backend
from lockstep.worker.graphs.dispatch import Dispatcher
from lockstep.worker.graphs.grid import Grid, build_grid, empty_grid
from lockstep.worker.graphs.mode import (
    AttentionSupport,
    GraphMode,
    ResolvedMode,
    RunMode,
    requested_mode,
    resolve_mode,
)
from lockstep.worker.graphs.padding import Batch, likely_batch

TOKENS_IN_STEP = 8192
_BATCH_TEXT = re.compile(r"(\d+):([DMEIZ])")


class PlannedGraphs(NamedTuple):
    """``requested`` became ``resolved``; the dispatcher has the grid."""

    requested: GraphMode
    resolved: ResolvedMode
    dispatcher: Dispatcher


def plan_graphs(options: PlanOptions) -> PlannedGraphs:
    """Resolve the mode and build the grid; nothing of this machine is looked at.

    Raises:
        ValueError: names the field, the value and the limit.
    """
    mode = "NONE" if options.enforce_eager else options.cudagraph_mode
    requested = requested_mode(mode, options.optimization_level)
    resolved = resolve_mode(requested, _support(options), options.query_len, options.split_points)
    sizes, cap = options.cudagraph_capture_sizes, options.max_cudagraph_capture_size
    grid = _grid(options, resolved.mode, sizes, cap)
    return PlannedGraphs(requested, resolved, Dispatcher(grid, resolved.mode, options.lora_cases))


def with_sizes(options: PlanOptions, mode: GraphMode, sizes: Iterable[int]) -> Dispatcher:
    """The dispatcher of the same options if these were the ``--cudagraph-capture-sizes``."""
    return Dispatcher(_grid(options, mode, sizes, None), mode, options.lora_cases)


def _support(options: PlanOptions) -> AttentionSupport:
    if options.attention_backend is not None:
        return find_backend(options.attention_backend).support
    return AttentionSupport[options.attention_support or "ALWAYS"]


def _grid(
    options: PlanOptions, mode: GraphMode, sizes: Iterable[int] | None, cap: int | None
) -> Grid:
    seqs = options.max_num_seqs
    tokens = tokens_in_step(options.max_num_batched_tokens, TOKENS_IN_STEP, seqs)
    limits = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "query_len": options.query_len,
    }
    if mode is GraphMode.NONE:
        return empty_grid(**limits)
    return build_grid(
        **limits,
        capture_sizes=sizes,
        max_capture_size=cap,
        compute_capability=capability_of(options.compute_capability),
        performance_mode=options.performance_mode,
    )


def batch_of(options: PlanOptions, grid: Grid) -> Batch | None:
    """The batch that ``--batch`` and its companions describe.

    Raises:
        ValueError: no such batch can be scheduled.
    """
    num_tokens = options.batch
    if num_tokens is None:
        return None
    _at_most("batch", num_tokens, "max_num_batched_tokens", grid.max_num_batched_tokens)
    loras = options.num_active_loras or 0
    if options.batch_reqs is None and options.uniform_query_len is None:
        return likely_batch(num_tokens, grid)._replace(num_active_loras=loras)
    query_len = options.uniform_query_len or 0
    num_reqs = options.batch_reqs or _num_reqs(num_tokens, query_len, grid)
    _at_most("batch_reqs", num_reqs, "max_num_seqs", grid.max_num_seqs)
    _at_most("batch_reqs", num_reqs, "batch", num_tokens)
    if query_len and num_reqs * query_len != num_tokens:
        raise ValueError(
            f"batch {num_tokens} must be batch_reqs {num_reqs} x uniform_query_len {query_len}"
        )
    return Batch(num_tokens, num_reqs, query_len, loras)


def _num_reqs(num_tokens: int, query_len: int, grid: Grid) -> int:
    return num_tokens // query_len if query_len else min(num_tokens, grid.max_num_seqs)


def _at_most(field: str, value: int, limit_field: str, limit: int) -> None:
    if value > limit:
        raise ValueError(f"{field} must be at most {limit_field}={limit}, got {value}")


class Agreed(msgspec.Struct, frozen=True):
    """What a lockstep group runs, in the notation of the agreement vectors."""

    run_mode: str
    num_tokens_padded: int | None


def agreement_of(texts: Iterable[str], dispatcher: Dispatcher) -> Agreed:
    """Agreement of the replicas whose batches are written TOKENS:KIND.

    Raises:
        ValueError: a text that is none, or a batch that cannot be scheduled.
    """
    grid = dispatcher.grid
    proposals = [_proposal(text, grid) for text in texts]
    agreed = agree(proposals, dispatcher.dispatch, query_len=grid.query_len)
    name = "NO_STEP" if agreed.run_mode == NO_STEP else RunMode(agreed.run_mode).name
    return Agreed(name, agreed.num_tokens_padded)


def _proposal(text: str, grid: Grid) -> Proposal:
    found = _BATCH_TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"agree takes TOKENS:KIND with kind D, M, E, I or Z, got {text!r}")
    num_tokens, kind = int(found[1]), found[2]
    if kind in "IZ":
        allowed = (0, grid.query_len) if kind == "I" else (0,)
        if num_tokens not in allowed:
            few = " or ".join(map(str, allowed))
            raise ValueError(f"agree {text}: tokens without work must be {few}")
        return Proposal(0, 0, grid.query_len, 0, RunMode.FULL)
    if not 1 <= num_tokens <= grid.max_num_batched_tokens:
        limit = grid.max_num_batched_tokens
        raise ValueError(f"agree {text}: tokens must be 1 to max_num_batched_tokens={limit}")
    batch = likely_batch(num_tokens, grid)
    if kind == "M":
        batch = Batch(num_tokens, min(num_tokens, grid.max_num_seqs), 0)
    if kind == "D" and not batch.uniform_query_len:
        raise ValueError(
            f"agree {text}: a decode batch is query_len={grid.query_len} for each of at most "
            f"max_num_seqs={grid.max_num_seqs} requests"
        )
    return Proposal(*batch, RunMode.EAGER if kind == "E" else RunMode.FULL)
