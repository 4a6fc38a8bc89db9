"""The small operations of a layer: plain torch on a CPU, Triton kernels on CUDA.

The torch paths are what the kernels are tested against. Triton is imported at the first CUDA call.
"""

import torch
from torch import Tensor

from lockstep.parallel.placement import LinearOps, TorchLinear


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of x [num_tokens, size], computed in float32 and rounded once."""
    if _has_kernels(x):
        from lockstep.worker.kernels import norm

        return norm.rms_norm(x, weight, eps)
    return rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the rounded sum, rounded sum) of x and residual, each [num_tokens, size]."""
    if _has_kernels(x):
        from lockstep.worker.kernels import norm

        return norm.add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return rms_norm_torch(total, weight, eps), total


def norm_rope_(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Norm each head of q and k with its weight, then rotate it by its position, in place.

    Args:
        q, k: [num_tokens, heads, head_dim], the heads of a token contiguous.
        positions: [num_tokens] int64.
        cos_sin: [max_positions, head_dim] float32, cosines, then sines.
        weights: of the q and of the k norm, each [head_dim]; None rotates only.
    """
    if _has_kernels(q):
        from lockstep.worker.kernels import rope

        rope.norm_rope_(q, k, positions, cos_sin, weights, eps)
        return
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    for x, weight in zip((q, k), weights or (None, None), strict=True):
        wide = x.float() if weight is None else _norm(x, weight, eps)
        low, high = wide.chunk(2, dim=-1)
        x.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))


def _has_kernels(x: Tensor) -> bool:
    """Not where torch.compile makes kernels of its own out of the torch paths."""
    return x.is_cuda and not torch.compiler.is_compiling()


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``rms_norm`` over the last dim in plain torch, on any device."""
    return _norm(x, weight, eps).to(x.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


def linear_ops(device: torch.device) -> LinearOps:
    """How weights on this device are multiplied by."""
    if device.type != "cuda":
        return TorchLinear()
    from lockstep.worker.kernels.linear import KernelLinear

    return KernelLinear(device)
