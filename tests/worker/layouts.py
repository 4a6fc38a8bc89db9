"""Ranks laid out as TP x DP in every way, and what a rank tells of serving in each of them."""

from collections.abc import Sequence
from typing import NamedTuple
from unittest.mock import patch

import msgspec
from lockstep_ranks import serve_over
from ranks import Rank, join

from lockstep.comm.messages import AddRequest
from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.topology import Topology
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs import runner


class Told(NamedTuple):
    """Tokens by request, the digest of the manifest, and of each graph what it communicates."""

    tokens: dict[str, list[int]]
    manifest: str
    ledgers: list[list[str]]


def layouts(num_ranks: int) -> list[ParallelConfig]:
    """From one replica of all ranks to one of each; replicas take every step together."""
    return [
        ParallelConfig(
            tp_size=tp_size, dp_size=num_ranks // tp_size, dp_lockstep="always",
            verify_agreement=True,
        )
        for tp_size in range(num_ranks, 0, -1)
        if num_ranks % tp_size == 0
    ]  # fmt: skip


def name_of(layout: ParallelConfig) -> str:
    """Such as TP4, TP2xDP2 or DP4."""
    axes = {"TP": layout.tp_size, "DP": layout.dp_size}
    return "x".join(f"{axis}{size}" for axis, size in axes.items() if size > 1)


def serve_layouts(
    rank: Rank, layouts: Sequence[Sequence[bytes]], adds: list[AddRequest], device: str = "cpu"
) -> list[list[Told]]:
    """Every layout in turn, and in each its configurations in turn over the same groups.

    On CUDA only one: torch keeps what it knows of groups by their names, and these come again.
    """
    told = []
    for epoch, data in enumerate(layouts):
        configs = [msgspec.msgpack.decode(each, type=WorkerConfig) for each in data]
        sizes = msgspec.structs.asdict(configs[0].parallel)
        topology = join(rank, device=device, epoch=epoch, **sizes)
        told.append([_serve(topology, config, adds) for config in configs])
        topology.destroy()
    return told


def _serve(topology: Topology, config: WorkerConfig, adds: list[AddRequest]) -> Told:
    with (
        patch.object(runner, "compare_manifests", wraps=runner.compare_manifests) as manifests,
        patch.object(runner, "compare_ledgers", wraps=runner.compare_ledgers) as ledgers,
    ):
        tokens, _ = serve_over(topology, config, adds)
    entries = [call.args[0] for call in ledgers.call_args_list]
    [manifest] = [call.args[0] for call in manifests.call_args_list]
    return Told(tokens, manifest.digest(), [[str(entry) for entry in each] for each in entries])
