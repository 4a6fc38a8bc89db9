"""What a start took, in lines: graphs by size, and memory by rank."""

from collections.abc import Iterator, Sequence

from lockstep.comm.messages import GraphCost, WorkerReady
from lockstep.launcher.engine import EngineSummary

_MIB = 1 << 20
_GIB = 1 << 30
_CAPTURE = "capture"
_TEXTS = {
    "kv_cache": "KV cache",
    "before_start": "before the start (CUDA context, other processes)",
}


def start_report(summary: EngineSummary) -> list[str]:
    """Lines for a person: the slowest rank's capture, then a line of memory for each rank."""
    lines = list[str]()
    slowest = max(summary.ready, key=lambda ready: ready.stage_seconds.get(_CAPTURE, 0.0))
    if slowest.graph_costs:
        lines += [_finished(slowest), _by_size(slowest.graph_costs)]
    for ready in summary.ready:
        lines += _memory(ready)
    return lines


def _finished(ready: WorkerReady) -> str:
    num_bytes = sum(cost.num_bytes for cost in ready.graph_costs)
    took = f", took {num_bytes / _GIB:.2f} GiB" if ready.memory.total else ""
    return (
        f"graph capturing finished in {ready.stage_seconds.get(_CAPTURE, 0.0):.1f} s{took}: "
        f"{ready.num_graphs} graphs of {len(ready.graph_costs)} sizes"
    )


def _by_size(costs: Sequence[GraphCost]) -> str:
    counted = any(cost.num_bytes for cost in costs)
    unit = "s and MiB" if counted else "s"
    return f"graphs by size ({unit}): {', '.join(_cost(cost, counted) for cost in costs)}"


def _cost(cost: GraphCost, counted: bool) -> str:
    kind = "" if cost.uniform_query_len else "mixed "
    size = f" {cost.num_bytes / _MIB:.1f}" if counted else ""
    return f"{kind}{cost.num_tokens}: {cost.seconds:.3f}{size}"


def _memory(ready: WorkerReady) -> Iterator[str]:
    memory = ready.memory
    if not memory.parts:
        return
    parts = ", ".join(f"{_text(name)} {size / _GIB:.2f}" for name, size in memory.parts.items())
    line = f"rank {ready.global_rank} memory in GiB: {parts}; {ready.num_blocks} KV blocks"
    if memory.total:
        used = sum(memory.parts.values())
        line += f"; in use {used / _GIB:.2f} of {memory.total / _GIB:.2f}"
    if memory.budget:
        line += f", budget {memory.budget / _GIB:.2f}"
    yield line
    if memory.estimate_error is not None:
        yield (
            f"rank {ready.global_rank} memory beside the KV cache was estimated: "
            f"{memory.estimate_error / _MIB:+.1f} MiB against what was then used"
        )


def _text(name: str) -> str:
    return _TEXTS.get(name, name)
