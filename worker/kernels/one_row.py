"""y = x W^T for one row: products summed in registers while W streams by. CUDA, Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.kernels.chain import chained, follow
from lockstep.worker.kernels.linear_tiles import Tiles, one_row_tiles, starts_next_first


@triton.jit
def take_columns(OUT: tl.constexpr, TILE_N: tl.constexpr):
    """(output columns of this program, which there are)."""
    columns = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    # Columns past the last repeat it: the stream of weights then needs no second mask.
    return tl.minimum(columns, OUT - 1), columns < OUT


@triton.jit
def load_numbers(row_ptr, at, SIZE: tl.constexpr):
    """Numbers ``at`` of a row of ``SIZE`` as float32, zeros past its end."""
    return tl.load(row_ptr + at, mask=at < SIZE, other=0.0).to(tl.float32)


@triton.jit
def load_weights(
    w_ptr, columns, at, OUT: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """(weights, those of up) of output columns and input features ``at``; one, twice, if plain."""
    places, live = w_ptr + columns[:, None] * SIZE + at[None, :], (at < SIZE)[None, :]
    w = tl.load(places, mask=live, other=0.0)
    up_w = w
    if GATED:
        up_w = tl.load(places + OUT * SIZE, mask=live, other=0.0)
    return w, up_w


@triton.jit
def leave_columns(
    out_ptr, bias_ptr, columns, live_columns, y, up, OUT: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Store y, or silu(y) * up, of sums without their bias."""
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns).to(tl.float32)
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias_ptr + OUT + columns).to(tl.float32)
        y = y * tl.sigmoid(y) * up
    tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=live_columns)


@triton.jit
def _one_row_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, OUT: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, NEXT_FIRST: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    columns, live_columns = take_columns(OUT, TILE_N)
    at = tl.arange(0, TILE_K)
    # Nobody writes weights: the first of them are here when the kernel ahead ends.
    w, up_w = load_weights(w_ptr, columns, at, OUT, SIZE, GATED)
    follow(CHAINED, NEXT_FIRST)
    x = load_numbers(x_ptr, at, SIZE)
    products = w.to(tl.float32) * x[None, :]
    up_products = up_w.to(tl.float32) * x[None, :]
    for k in range(TILE_K, SIZE, TILE_K):
        w, up_w = load_weights(w_ptr, columns, k + at, OUT, SIZE, GATED)
        x = load_numbers(x_ptr, k + at, SIZE)
        products += w.to(tl.float32) * x[None, :]
        if GATED:
            up_products += up_w.to(tl.float32) * x[None, :]
    y, up = tl.sum(products, 1), tl.sum(up_products, 1)
    leave_columns(out_ptr, bias_ptr, columns, live_columns, y, up, OUT, GATED, HAS_BIAS)


def one_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [1, in_size], weight [out_size, in_size] -> [1, out_size], or half of that if gated.

    Into ``out``, if there is one: contiguous, of any float type.
    """
    in_size, out_size = x.shape[1], weight.shape[0] // (1 + gated)
    tiles = tiles or one_row_tiles(in_size, gated=gated)
    if out is None:
        out = torch.empty((1, out_size), dtype=x.dtype, device=x.device)
    _one_row_kernel[(triton.cdiv(out_size, tiles.tile_n),)](
        out, x, weight, weight if bias is None else bias,
        OUT=out_size, SIZE=in_size, GATED=gated, HAS_BIAS=bias is not None,
        TILE_N=tiles.tile_n, TILE_K=tiles.tile_k, NEXT_FIRST=starts_next_first(weight.numel(), 1),
        num_warps=tiles.num_warps, **chained(),
    )  # fmt: skip
    return out
