"""What sums take, each with the norm that follows it, in graphs as decode steps hold them."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.comm.all_reduce.base import AddNorm, AllReduce, FusedAllReduce
from lockstep.comm.messages import SumTimes
from lockstep.parallel.topology import Topology
from lockstep.worker.graphs.backend import Captured, GraphBackend

MAX_BYTES = 8 << 20
_CALLS_PER_GRAPH = 16
_REPEATS = 3


class _Entry(NamedTuple):
    """One algorithm at one size."""

    num_bytes: int
    name: str
    call: Callable[[], object]


def measure(
    topology: Topology,
    norm: AddNorm,
    fused: FusedAllReduce | None,
    row_counts: Sequence[int],
    backend: GraphBackend,
) -> list[SumTimes]:
    """This rank's times of ``topology.tp``'s algorithms; all of ``topology.lockstep`` call this.

    Args:
        row_counts: of the tensors, whose rows have the norm's size.
        backend: for graphs of its own; released at the end.
    """
    entries = [
        entry
        for rows in row_counts
        for entry in _entries(topology.tp.table.algorithms.values(), fused, norm, rows)
    ]
    with backend.session() as session:
        for entry in entries:
            session.warm_up(partial(_discard, entry.call, 1))
        session.idle()
        topology.retire()
        topology.lockstep.barrier()
        graphs = [
            session.capture(partial(_discard, entry.call, _CALLS_PER_GRAPH)) for entry in entries
        ]
    topology.lockstep.barrier()
    found: dict[int, dict[str, float]] = {}
    for entry, graph in zip(entries, graphs, strict=True):
        took = _microseconds(graph, norm.weight.device) / _CALLS_PER_GRAPH
        found.setdefault(entry.num_bytes, {})[entry.name] = took
    graphs.clear()
    backend.release()
    return [SumTimes(num_bytes, took) for num_bytes, took in found.items()]


def row_counts_up_to(max_rows: int, row_bytes: int) -> list[int]:
    """Powers of two up to ``max_rows`` and ``MAX_BYTES``."""
    most = max(1, min(max_rows, MAX_BYTES // row_bytes))
    return [1 << power for power in range(most.bit_length())]


def _entries(sums: Any, fused: FusedAllReduce | None, norm: AddNorm, rows: int) -> Iterator[_Entry]:
    # Zeros stay zeros however often they are summed in place.
    x = norm.weight.new_zeros(rows, len(norm.weight))
    residual = torch.zeros_like(x)
    for algorithm in sums:
        if algorithm.supports(x):
            yield _Entry(x.nbytes, algorithm.name, partial(_in_turn, algorithm, norm, x, residual))
    if fused is not None and fused.supports(x):
        yield _Entry(x.nbytes, fused.name, partial(fused, x, residual, norm))


def _in_turn(algorithm: AllReduce, norm: AddNorm, x: Tensor, residual: Tensor) -> object:
    return norm.add(algorithm(x), residual)


def _discard(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def _microseconds(graph: Captured, device: torch.device) -> float:
    """Median of a replay. One runs ahead of it, so that the ranks begin it together."""
    timer = _on_cuda if device.type == "cuda" else _on_host
    return statistics.median(timer(graph, device) for _ in range(_REPEATS))


def _on_cuda(graph: Captured, device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    begin.record(torch.cuda.current_stream(device))
    graph.replay()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _on_host(graph: Captured, device: torch.device) -> float:
    graph.replay()
    began = time.perf_counter()
    graph.replay()
    return (time.perf_counter() - began) * 1e6
