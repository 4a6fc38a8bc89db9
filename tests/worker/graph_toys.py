"""A step small enough to reason about: static tensors, a body that sums over ranks, a tail."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lockstep.comm.collectives import Communicator
from lockstep.worker.graphs.dispatch import BatchDescriptor
from lockstep.worker.graphs.manifest import Manifest, ManifestEntry
from lockstep.worker.graphs.mode import RunMode

WIDTH = 16


def manifest_of(*sizes: int, **choices: str) -> Manifest:
    entries = tuple(ManifestEntry(RunMode.FULL, descriptor(size)) for size in sizes)
    return Manifest(entries, tuple(sorted(choices.items())))


def descriptor(size: int) -> BatchDescriptor:
    return BatchDescriptor(size, size, 1)


class ToyState:
    """``x`` -> body -> ``y`` -> tail -> ``steps`` and ``x`` of the next step."""

    def __init__(self, max_lanes: int = 8, device: str | torch.device = "cpu") -> None:
        self.generation = 0
        self.x = torch.zeros(max_lanes, WIDTH, device=device)
        self.y = torch.zeros(max_lanes, WIDTH, device=device)
        self.steps = torch.zeros(max_lanes, dtype=torch.int64, device=device)

    def statics(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


class ToyStep:
    """Body and tail over a ToyState; ``calls`` counts how often Python ran them, by size."""

    def __init__(self, state: ToyState, comm: Communicator) -> None:
        self.state = state
        self.comm = comm
        self.calls: dict[int, int] = {}
        weights = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH
        self.weights = weights.to(state.x.device)

    def body(self, size: int) -> None:
        self.calls[size] = self.calls.get(size, 0) + 1
        hidden = torch.tanh(self.state.x[:size] @ self.weights)
        self.state.y[:size].copy_(self.comm.all_reduce(hidden))

    def tail(self, size: int) -> None:
        self.state.steps[:size].add_(1)
        self.state.x[:size].add_(self.state.y[:size])

    def parts(self, key: BatchDescriptor) -> Mapping[str, Callable[[], None]]:
        size = key.num_tokens
        return {"body": lambda: self.body(size), "tail": lambda: self.tail(size)}
