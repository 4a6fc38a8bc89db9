"""Two ranks that capture differently: what rank 1 does, and what all must be told."""

import random
import time

from graph_toys import ToyState, ToyStep, manifest_of
from ranks import Rank, join

from lockstep.comm.ledger import LedgerEntry
from lockstep.worker.graphs.cuda import CudaBackend
from lockstep.worker.graphs.dispatch import BatchDescriptor
from lockstep.worker.graphs.host import HostBackend
from lockstep.worker.graphs.manifest import Manifest, ManifestEntry
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.graphs.runner import GraphRunner


def two(rank: Rank, device: str) -> tuple[GraphRunner, ToyStep]:
    """A runner and a step that sums over both ranks, on "cpu" or "cuda"."""
    topology = join(rank, device=device, timeout_s=20.0 if device == "cpu" else 60.0)
    step = ToyStep(ToyState(device=topology.spec.device), topology.tp)
    backend = HostBackend() if device == "cpu" else CudaBackend(step.state.x.device)
    return GraphRunner(backend, topology), step


def _reversed_list(rank: Rank, device: str) -> None:
    runner, step = two(rank, device)
    sizes = (4, 2, 1) if rank.rank == 0 else (1, 2, 4)
    time.sleep(random.Random(rank.rank).uniform(0, 1))
    runner.capture_all(manifest_of(*sizes), step.parts, step.state)


def _other_choice(rank: Rank, device: str) -> None:
    runner, step = two(rank, device)
    manifest = manifest_of(4, tp="one_shot" if rank.rank == 1 else "nccl")
    runner.capture_all(manifest, step.parts, step.state)


def _whole_instead_of_segments(rank: Rank, device: str) -> None:
    runner, step = two(rank, device)
    split = ManifestEntry(RunMode.PIECEWISE, BatchDescriptor(8, None, 0))
    whole = ManifestEntry(RunMode.FULL, BatchDescriptor(8, 8, 0))
    manifest = Manifest((split if rank.rank == 0 else whole,))
    runner.capture_all(manifest, step.parts, step.state)


def _one_more_operation(rank: Rank, device: str) -> None:
    runner, step = two(rank, device)

    def parts(key):
        given = dict(step.parts(key))
        if rank.rank == 1 and key.num_tokens == 2:
            given["tail"] = lambda: step.comm.all_reduce(step.state.x)
        return given

    runner.capture_all(manifest_of(4, 2, 1), parts, step.state)


def _one_more_in_a_segment(rank: Rank, device: str) -> None:
    runner, step = two(rank, device)

    def last() -> None:
        if rank.rank == 1:
            step.comm.all_reduce(step.state.x)

    def parts(key):
        return {"segment 0": lambda: step.body(8), "segment 1": last}

    split = ManifestEntry(RunMode.PIECEWISE, BatchDescriptor(8, None, 0))
    runner.capture_all(Manifest((split,)), parts, step.state)


def _other_size(rank: Rank, device: str) -> None:
    runner, step = two(rank, device)

    def parts(key):
        width = 4 if rank.rank == 1 and key.num_tokens == 2 else 16
        return {"body": lambda: step.comm.all_reduce(step.state.x[:1, :width])}

    runner.capture_all(manifest_of(4, 2, 1), parts, step.state)


def _differs_only_while_capturing(rank: Rank, device: str) -> None:
    runner, step = two(rank, device)
    entry = LedgerEntry("all_reduce", "gloo", "tp", 2, 64, "float32")
    calls: list[int] = []

    def body() -> None:
        step.tail(4)
        calls.append(0)
        for _ in range(129 if rank.rank == 1 and len(calls) == 2 else 130):
            step.comm.ledger.note(entry)

    runner.capture_all(manifest_of(4), lambda key: {"body": body}, step.state)


MISMATCHES = [
    (
        _reversed_list,
        r"manifests differ: rank 1 has FULL size 1 .* position 0, "
        r"where rank 0 has FULL size 4 .* position 0",
    ),
    (_other_choice, "manifests differ: rank 1 has tp = one_shot, where rank 0 has tp = nccl"),
    (
        _whole_instead_of_segments,
        r"manifests differ: rank 1 has FULL size 8 .* where rank 0 has PIECEWISE size 8",
    ),
    (
        _one_more_operation,
        r"rank 1 operation 0 at size 2, tail: all_reduce by \S+ over tp.2., 128 x float32.*, "
        "rank 0 operation 0 at size 2, tail: nothing more",
    ),
    (
        _one_more_in_a_segment,
        r"rank 1 operation 0 at size 8 in segments, segment 1: all_reduce by .*, "
        "rank 0 operation 0 at size 8 in segments, segment 1: nothing more",
    ),
    (
        _other_size,
        "rank 1 operation 0 at size 2, body: .* 4 x float32.*, "
        "rank 0 operation 0 at size 2, body: .* 16 x float32",
    ),
    (
        _differs_only_while_capturing,
        "rank 1 recorded 129 operations at size 4, rank 0 recorded 130 operations at size 4; "
        "first difference at operation 129: rank 1 nothing, rank 0 all_reduce by gloo",
    ),
]
