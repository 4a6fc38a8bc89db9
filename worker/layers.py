"""Layers of a decoder without rank arithmetic: norm, rotary embedding, attention."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lockstep.parallel.placement import Placement
from lockstep.parallel.weight_shard import WeightShard, replicated
from lockstep.worker.attention.base import AttentionBackend
from lockstep.worker.config import RopeScaling
from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.kernels.ops import add_rms_norm, norm_rope_, rms_norm
from lockstep.worker.kv_cache import KVCache
from lockstep.worker.rotation import Rotation


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, computed in float32, rounded once."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = place.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normed, new residual) of ``x + residual``."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield replicated(f"{name}.weight", self.weight)


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of each pair of dims, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between interpolated."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


class RotaryEmbedding(nn.Module):
    """Rotates halves of each head by position, in place or by whoever takes ``rotation``.

    The table is [max_positions, head_dim] float32: cosines, then sines.
    """

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        *,
        theta: float,
        scaling: RopeScaling | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, rotary_frequencies(head_dim, theta, scaling))
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)
        self.register_buffer("cos_sin", table, persistent=False)
        self.cos_sin: Tensor

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor, norms: "tuple[RMSNorm, RMSNorm] | None"
    ) -> None:
        """q and k are [num_tokens, heads, head_dim]; each head is normed first, if by anything."""
        turn = self.rotation(norms)
        norm_rope_(q, k, positions, turn.cos_sin, turn.weights, turn.eps)

    def rotation(self, norms: "tuple[RMSNorm, RMSNorm] | None") -> Rotation:
        """What ``forward`` does, for an attention that does it on its way."""
        if norms is None:
            return Rotation(self.cos_sin, None, 0.0)
        return Rotation(self.cos_sin, (norms[0].weight, norms[1].weight), norms[0].eps)


class Attention(nn.Module):
    """The one place where a model calls its attention backend."""

    def __init__(
        self, layer_id: int, backend: AttentionBackend, *, scale: float, window: int | None
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.backend = backend
        self.scale = scale
        self.window = window

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        metadata: AttentionMetadata,
        kv: KVCache,
        rotation: Rotation | None,
        out: Tensor,
    ) -> None:
        """q, k, v [num_tokens, heads, head_dim], rows may be strided; ``out`` is like q, dense."""
        self.backend.forward(
            q,
            k,
            v,
            kv.layer(self.layer_id),
            metadata,
            scale=self.scale,
            window=self.window,
            rotation=rotation,
            out=out,
        )
