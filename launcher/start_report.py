"""What a start took, in lines: graphs by size, memory by rank, and what was captured later."""

from collections.abc import Iterator, Sequence

from lockstep.comm.messages import GraphCost, SumTimes, WorkerReady
from lockstep.launcher.engine import EngineSummary
from lockstep.worker.schedule.stats import SchedulerStats

_MIB = 1 << 20
_GIB = 1 << 30
_CAPTURE = "capture"
_TEXTS = {
    "kv_cache": "KV cache",
    "before_start": "before the start (CUDA context, other processes)",
}


def start_report(summary: EngineSummary) -> list[str]:
    """Lines for a person: the slowest rank's capture, all-reduces, then each rank's memory."""
    lines = list[str]()
    slowest = max(summary.ready, key=lambda ready: ready.stage_seconds.get(_CAPTURE, 0.0))
    if slowest.graph_costs:
        lines += [_finished(slowest), _by_size(slowest.graph_costs)]
    if slowest.num_late_graphs:
        lines.append(
            f"{slowest.num_late_graphs} more sizes are captured while serving{_kept_free(slowest)}"
        )
    if slowest.sum_times:
        lines.append(_sums(slowest))
    for ready in summary.ready:
        lines += _memory(ready)
    return lines


def late_report(summary: EngineSummary, stats: SchedulerStats) -> list[str]:
    """A line for each replica that captures while serving: how far it has come, at what cost."""
    if not stats.num_late_graphs:
        return []
    tp_size = len(summary.ready) // len(stats.replicas)
    return [
        _late(replica, stats.replicas[replica].late_graphs, stats.num_late_graphs, ready)
        for replica, ready in enumerate(summary.ready[::tp_size])
    ]


def num_graphs(summary: EngineSummary, stats: SchedulerStats) -> str:
    """How many each rank has by now; "14 to 24" if some replicas have captured more than others."""
    late = [sum(cost.num_graphs for cost in each.late_graphs) for each in stats.replicas] or [0]
    counts = sorted({min(late), max(late)})
    return " to ".join(str(summary.num_graphs + count) for count in counts)


def _late(replica: int, costs: Sequence[GraphCost], wanted: int, ready: WorkerReady) -> str:
    seconds = sum(cost.seconds for cost in costs)
    took = sum(cost.num_bytes for cost in costs) / _MIB
    memory = f", which took {took:.1f} MiB{_kept_free(ready)}" if ready.memory.total else ""
    return (
        f"replica {replica} captured {len(costs)} of {wanted} sizes while serving, "
        f"in {seconds:.2f} s{memory}"
    )


def _kept_free(ready: WorkerReady) -> str:
    if not ready.memory.total:
        return ""
    return f" ({ready.memory.graph_reserve / _MIB:.1f} MiB left free for all of them)"


def _sums(ready: WorkerReady) -> str:
    rows = ", ".join(f"{row.num_bytes / 1024:g}: {_times(row)}" for row in ready.sum_times)
    return f"all-reduce {ready.all_reduce}; with a norm behind it, us by KiB: {rows}"


def _times(row: SumTimes) -> str:
    return " ".join(f"{name} {took:.1f}" for name, took in row.microseconds.items())


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
