"""Where a tensor of a checkpoint goes: the parameter that holds this rank's shard of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from lockstep.parallel.shard import Shard, whole_shard


@dataclass(frozen=True, slots=True)
class WeightShard:
    """``target`` is a view of a parameter; ``shape`` is that of the whole checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    target: Tensor
    shard: Shard


@runtime_checkable
class HasWeights(Protocol):
    """A module that is filled from a checkpoint."""

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        """Its tensors, named relative to the parent module; ``name`` is its own name there."""
        ...


def replicated(name: str, target: Tensor) -> WeightShard:
    """A tensor that every rank keeps in full."""
    return WeightShard(name, tuple(target.shape), target, whole_shard(target.shape[0]))
