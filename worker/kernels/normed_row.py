"""y = x W^T for one row x that is the RMSNorm of a sum, which is formed on the way. CUDA, Triton.

The factor that makes a row's square sum one is the same for all its numbers, so it is taken out of
the products and multiplied at their end: nobody waits for the norm before weights are read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.comm.all_reduce.base import AddNorm
from lockstep.worker.kernels.chain import chained, follow
from lockstep.worker.kernels.linear_tiles import normed_row_tiles, starts_next_first
from lockstep.worker.kernels.one_row import (
    leave_columns,
    load_numbers,
    load_weights,
    take_columns,
)


@triton.jit
def _add(total_ptr, x_ptr, residual_ptr, at, SIZE: tl.constexpr):
    """Numbers ``at`` of x + residual as float32; the first program leaves them in ``total_ptr``."""
    total = load_numbers(x_ptr, at, SIZE) + load_numbers(residual_ptr, at, SIZE)
    # The norm must see what later layers will see: the sum after rounding.
    total = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + at, total, mask=(at < SIZE) & (tl.program_id(0) == 0))
    return total.to(tl.float32)


@triton.jit
def _normed_one_row_kernel(
    out_ptr, total_ptr, x_ptr, residual_ptr, norm_ptr, w_ptr, bias_ptr, eps,
    OUT: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, NEXT_FIRST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    columns, live_columns = take_columns(OUT, TILE_N)
    at = tl.arange(0, TILE_K)
    # Nobody writes weights: the first of them are here when the kernel ahead ends.
    w, up_w = load_weights(w_ptr, columns, at, OUT, SIZE, GATED)
    norm = load_numbers(norm_ptr, at, SIZE)
    follow(CHAINED, NEXT_FIRST)
    total = _add(total_ptr, x_ptr, residual_ptr, at, SIZE)
    squares, x = total * total, total * norm
    products = w.to(tl.float32) * x[None, :]
    up_products = up_w.to(tl.float32) * x[None, :]
    for k in range(TILE_K, SIZE, TILE_K):
        w, up_w = load_weights(w_ptr, columns, k + at, OUT, SIZE, GATED)
        norm = load_numbers(norm_ptr, k + at, SIZE)
        total = _add(total_ptr, x_ptr, residual_ptr, k + at, SIZE)
        squares += total * total
        x = total * norm
        products += w.to(tl.float32) * x[None, :]
        if GATED:
            up_products += up_w.to(tl.float32) * x[None, :]
    scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    y, up = tl.sum(products, 1) * scale, tl.sum(up_products, 1) * scale
    leave_columns(out_ptr, bias_ptr, columns, live_columns, y, up, OUT, GATED, HAS_BIAS)


def normed_row(
    x: Tensor,
    residual: Tensor,
    norm: AddNorm,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    """(product, total): total is x + residual [1, size]; the product is of its norm.

    Args:
        weight: [out_size, size], contiguous; gate and up rows if ``gated``, which gives
            silu(gate) * up, [1, out_size / 2].
    """
    size, out_size = x.shape[1], weight.shape[0] // (1 + gated)
    tiles = normed_row_tiles(size, gated=gated)
    out = torch.empty((1, out_size), dtype=x.dtype, device=x.device)
    total = torch.empty((1, size), dtype=x.dtype, device=x.device)
    _normed_one_row_kernel[(triton.cdiv(out_size, tiles.tile_n),)](
        out, total, x, residual, norm.weight, weight, weight if bias is None else bias, norm.eps,
        OUT=out_size, SIZE=size, GATED=gated, HAS_BIAS=bias is not None,
        TILE_N=tiles.tile_n, TILE_K=tiles.tile_k, NEXT_FIRST=starts_next_first(weight.numel(), 1),
        num_warps=tiles.num_warps, **chained(),
    )  # fmt: skip
    return out, total
