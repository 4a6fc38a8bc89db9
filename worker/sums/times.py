"""What sums take, each with the norm that follows it, in graphs as decode steps hold them."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

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


class Race:
    """The algorithms of ``topology.tp`` in graphs; all of ``topology.lockstep`` do the same.

    Args:
        fused: runs too where it serves.
        row_counts: of the tensors, whose rows have the norm's size.
        backend: for these graphs alone.
    """

    def __init__(
        self,
        topology: Topology,
        norm: AddNorm,
        fused: FusedAllReduce | None,
        row_counts: Sequence[int],
        backend: GraphBackend,
    ) -> None:
        self._topology = topology
        self._device = norm.weight.device
        self._backend = backend
        sums = topology.tp.table.algorithms.values()
        self._entries = [e for rows in row_counts for e in _entries(sums, fused, norm, rows)]
        self._graphs = list[Captured]()

    def capture(self) -> None:
        """Once eagerly, then into graphs."""
        with self._backend.session() as session:
            for entry in self._entries:
                session.warm_up(partial(_repeat, entry.call, 1))
            session.idle()
            self._topology.retire()
            for entry in self._entries:
                self._graphs.append(session.capture(partial(_repeat, entry.call, _CALLS_PER_GRAPH)))

    def times(self) -> list[SumTimes]:
        """This rank's, once all ranks have captured."""
        found: dict[int, dict[str, float]] = {}
        for entry, graph in zip(self._entries, self._graphs, strict=True):
            took = _microseconds(graph, self._device) / _CALLS_PER_GRAPH
            found.setdefault(entry.num_bytes, {})[entry.name] = took
        return [SumTimes(num_bytes, took) for num_bytes, took in found.items()]

    def release(self) -> None:
        self._graphs.clear()
        self._backend.release()


def row_counts_up_to(max_rows: int, row_bytes: int) -> list[int]:
    """Powers of two up to ``max_rows`` and ``MAX_BYTES``."""
    most = max(1, min(max_rows, MAX_BYTES // row_bytes))
    return [1 << power for power in range(most.bit_length())]


def _entries(
    sums: Iterable[AllReduce], fused: FusedAllReduce | None, norm: AddNorm, rows: int
) -> Iterator[_Entry]:
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


def _repeat(call: Callable[[], object], count: int) -> None:
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
