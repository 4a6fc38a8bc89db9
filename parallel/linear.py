"""Linear layers over tensor-parallel ranks. They own the rank arithmetic, so models have none."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from lockstep.comm.all_reduce.base import AddNorm
from lockstep.parallel.placement import NormedSum, Placement
from lockstep.parallel.shard import HeadLayout, Shard, even_shard
from lockstep.parallel.weight_shard import WeightShard, replicated


class ColumnParallelLinear(nn.Module):
    """Output features split over ranks; several checkpoint tensors may be fused into one weight.

    ``forward`` maps [num_tokens, in_features] to [num_tokens, sum of local sizes], the parts in
    order. There is no communication.

    Args:
        parts: name of each fused tensor (without ".weight") and this rank's shard of its rows.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, Shard], place: Placement, *, bias: bool
    ) -> None:
        super().__init__()
        self.linear = place.linear
        self.in_features = in_features
        self.parts = dict(parts)
        self.sizes = [shard.local_size for shard in parts.values()]
        self.weight = place.parameter(sum(self.sizes), in_features)
        self.bias = place.parameter(sum(self.sizes)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.bias)

    def of_norm(self, summed: NormedSum) -> tuple[Tensor, Tensor]:
        """(``forward`` of ``summed``, the sum before its norm)."""
        return self.linear.of_norm(summed, self.weight, self.bias)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield from self._fused("weight", self.weight, (self.in_features,))
        if self.bias is not None:
            yield from self._fused("bias", self.bias, ())

    def _fused(self, kind: str, fused: Tensor, rest: tuple[int, ...]) -> Iterator[WeightShard]:
        targets = torch.split(fused, self.sizes)
        for (part, shard), target in zip(self.parts.items(), targets, strict=True):
            yield WeightShard(f"{part}.{kind}", (shard.full_size, *rest), target, shard)


class QKVParallelLinear(ColumnParallelLinear):
    """The fused query, key and value projection of one rank's heads."""

    def __init__(
        self, in_features: int, layout: HeadLayout, head_dim: int, place: Placement, *, bias: bool
    ) -> None:
        rank = place.tp.rank
        kv = layout.kv_shard(rank, head_dim)
        parts = {"q_proj": layout.query_shard(rank, head_dim), "k_proj": kv, "v_proj": kv}
        super().__init__(in_features, parts, place, bias=bias)


class GateUpParallelLinear(ColumnParallelLinear):
    """silu(gate) * up of the fused gate and up projection; ``out_features`` is the size of each."""

    def __init__(
        self, in_features: int, out_features: int, place: Placement, *, bias: bool
    ) -> None:
        tp = place.tp
        shard = even_shard(out_features, tp.size, tp.rank, what="intermediate_size")
        super().__init__(in_features, {"gate_proj": shard, "up_proj": shard}, place, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.gated(x, self.weight, self.bias)

    def of_norm(self, summed: NormedSum) -> tuple[Tensor, Tensor]:
        return self.linear.gated_of_norm(summed, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Input features split over ranks; the partial sums are added over the ranks.

    ``forward`` maps [num_tokens, shard.local_size] to [num_tokens, out_features], equal on all
    ranks.
    """

    def __init__(self, shard: Shard, out_features: int, place: Placement, *, bias: bool) -> None:
        super().__init__()
        self.shard = shard
        self.tp = place.tp
        self.linear = place.linear
        self.weight = place.parameter(out_features, shard.local_size)
        self.bias = place.parameter(out_features) if bias else None

    @classmethod
    def of_heads(
        cls, layout: HeadLayout, head_dim: int, out_features: int, place: Placement, *, bias: bool
    ) -> "RowParallelLinear":
        """Its input is the output of this rank's query heads."""
        shard = layout.query_shard(place.tp.rank, head_dim, dim=1)
        return cls(shard, out_features, place, bias=bias)

    @classmethod
    def even(
        cls, in_features: int, out_features: int, place: Placement, *, bias: bool
    ) -> "RowParallelLinear":
        """Its input is split into equal shares."""
        tp = place.tp
        shard = even_shard(in_features, tp.size, tp.rank, dim=1, what="intermediate_size")
        return cls(shard, out_features, place, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        # The bias follows the sum: added before, it would count once per rank.
        y = self.tp.all_reduce(self.linear(x, self.weight))
        return y if self.bias is None else y + self.bias

    def add_norm(self, x: Tensor, residual: Tensor, norm: AddNorm) -> tuple[Tensor, Tensor]:
        """``norm.add`` of ``forward`` and ``residual``, each [num_tokens, out_features]."""
        if self.bias is not None:
            return norm.add(self(x), residual)
        return self.tp.all_reduce_add_norm(self.linear(x, self.weight), residual, norm)

    def into(
        self, x: Tensor, residual: Tensor, norm: AddNorm, column: ColumnParallelLinear
    ) -> tuple[Tensor, Tensor]:
        """(``column`` of the norm of ``forward`` + ``residual``, that sum)."""
        if self.tp.size == 1 and self.bias is None:
            return column.of_norm(NormedSum(x, self.weight, residual, norm))
        normed, total = self.add_norm(x, residual, norm)
        return column(normed), total

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        shape = (self.weight.shape[0], self.shard.full_size)
        yield WeightShard(f"{name}.weight", shape, self.weight, self.shard)
        if self.bias is not None:
            yield replicated(f"{name}.bias", self.bias)
