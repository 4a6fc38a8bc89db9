"""Why a step runs eagerly, in words that do not depend on its size (pure, no torch)."""

from collections.abc import Sequence

from lockstep.parallel.agreement import Proposal
from lockstep.worker.graphs.dispatch import Dispatcher
from lockstep.worker.graphs.mode import GraphMode, RunMode


def eager_reason(
    dispatcher: Dispatcher,
    num_tokens: int,
    num_reqs: int,
    uniform_query_len: int,
    num_active_loras: int = 0,
) -> str:
    """Why no graph serves a batch; "" if one does."""
    batch = (num_tokens, num_reqs, uniform_query_len, num_active_loras)
    mode, grid = dispatcher.mode, dispatcher.grid
    if dispatcher.dispatch(*batch)[0] is not RunMode.EAGER:
        return ""
    if mode is GraphMode.NONE:
        return "the graph mode is NONE"
    if num_active_loras and not dispatcher.lora_cases[-1]:
        return "no graph was captured for active adapters"
    decode = mode.decode is RunMode.FULL and uniform_query_len == grid.query_len
    sizes = (*(grid.decode_sizes if decode else ()), *(grid.capture_sizes if mode.mixed else ()))
    kind = "decode" if decode else "mixed"
    if not sizes:
        return f"{mode} has no graphs for {kind} batches"
    if num_tokens > max(sizes):
        return f"{kind} batch above {max(sizes)} tokens"
    return "more requests than the graph of its size holds"


def fallback_reason(dispatcher: Dispatcher, proposals: Sequence[Proposal]) -> str:
    """Why a lockstep group agreed on EAGER; the first replica without a graph decides."""
    for *batch, max_mode in proposals:
        if batch[0] and (reason := eager_reason(dispatcher, *batch)):
            return reason
        if max_mode == RunMode.EAGER:
            return "graphs were held back for the step"
    return "no graph that serves every replica holds the largest batch"
