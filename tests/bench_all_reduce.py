"""Microseconds of sums over ranks in a graph, by size and algorithm: a benchmark, not a test.

    python tests/bench_all_reduce.py --ranks 2
    python tests/bench_all_reduce.py --ranks 8 --hidden 4096 8192 --dtype float32

For rows of each hidden size, up to 8 MiB: sums alone, then each with the residual add and RMSNorm
that follow it, which the fused one does itself. Medians of replays of 16 calls, the slowest rank
counts. Last comes the table that a start of an engine with such rows would choose.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from ranks import Rank, join, run_ranks
from torch import Tensor

from lockstep.comm.all_reduce.fastest import fastest
from lockstep.comm.messages import SumTimes
from lockstep.parallel.placement import Placement
from lockstep.worker.graphs.backend import GraphBackend
from lockstep.worker.graphs.cuda import CudaBackend
from lockstep.worker.graphs.host import HostBackend
from lockstep.worker.layers import RMSNorm
from lockstep.worker.sums.choose import run_race
from lockstep.worker.sums.fused import create_fused
from lockstep.worker.sums.times import MAX_BYTES, Race, row_counts_up_to

Lines = list[str]


class NoNorm:
    """Leaves a sum as it is."""

    eps = 0.0

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return x, residual


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    reports = run_ranks(
        _report, args.ranks, args.device, tuple(args.hidden), args.dtype, gloo=False, timeout_s=580
    )
    sys.stdout.write("\n".join(reports[0]) + "\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    return parser.parse_args(argv)


def _report(rank: Rank, device: str, hidden_sizes: Sequence[int], dtype: str) -> Lines:
    topology = join(rank, device=device, timeout_s=60.0)
    topology.connect()
    lines = Lines()
    for hidden in hidden_sizes:
        place = Placement(topology.tp, torch.device(topology.spec.device), getattr(torch, dtype))
        norm = RMSNorm(hidden, 1e-5, place)
        norm.weight.fill_(1.0)
        lines += _hidden_size(topology, norm, f"{rank.size} ranks, {hidden} x {dtype} a row")
    topology.destroy()
    return lines


def _hidden_size(topology, norm: RMSNorm, name: str) -> Lines:
    cuda = norm.weight.is_cuda
    fused = create_fused(topology.tp, norm) if cuda else "there is one on CUDA only"
    found = None if isinstance(fused, str) else fused
    counts = row_counts_up_to(MAX_BYTES, norm.weight.nbytes)
    alone = _slowest(topology, NoNorm(norm.weight), None, counts)
    began = time.perf_counter()
    normed = _slowest(topology, norm, found, counts)
    seconds = time.perf_counter() - began
    library = next(iter(topology.tp.table.algorithms))
    table = ",".join(map(str, fastest(normed, library)))
    without = [f"without the fused one: {fused}"] if found is None else []
    return [
        "", name, *_table(alone, normed), *without,
        f"choice: {table} (measured in {seconds:.2f} s)",
    ]  # fmt: skip


def _slowest(topology, norm, fused, counts: Sequence[int]) -> list[SumTimes]:
    cuda = norm.weight.is_cuda
    backend: GraphBackend = CudaBackend(norm.weight.device) if cuda else HostBackend()
    times = run_race(Race(topology, norm, fused, counts, backend), topology)
    if isinstance(times, str):
        raise RuntimeError(times)
    return times


def _table(alone: list[SumTimes], normed: list[SumTimes]) -> Lines:
    names = list(dict.fromkeys(name for row in alone for name in row.microseconds))
    with_norm = list(dict.fromkeys(name for row in normed for name in row.microseconds))
    titles = ["KiB", *names, *(f"{name}+norm" for name in with_norm)]
    rows = [
        [f"{row.num_bytes / 1024:g}", *_times(row, names), *_times(other, with_norm)]
        for row, other in zip(alone, normed, strict=True)
    ]
    ruler = ["---"] * len(titles)
    return [f"| {' | '.join(cells)} |" for cells in [titles, ruler, *rows]]


def _times(row: SumTimes, names: Sequence[str]) -> list[str]:
    took = row.microseconds
    return [f"{took[name]:.1f}" if name in took else "-" for name in names]


if __name__ == "__main__":
    main()
