"""y = x W^T for one row: products summed in registers while W streams by. CUDA, Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.kernels.chain import chained, follow, prefetch_rows
from lockstep.worker.kernels.linear_tiles import Tiles, one_row_ahead, one_row_tiles


@triton.jit
def _dot_row(
    y, x, w_ptr, columns, at, live, SIZE: tl.constexpr
):  # fmt: skip
    w = tl.load(w_ptr + columns[:, None] * SIZE + at[None, :], mask=live[None, :], other=0.0)
    return y + w.to(tl.float32) * x[None, :]


@triton.jit
def take_columns(
    w_ptr, OUT: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr, TILE_N: tl.constexpr,
    AHEAD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """(output columns of this program, which there are); fetches the first of their weights."""
    columns = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    live_columns = columns < OUT
    # Columns past the last repeat it: the stream of weights then needs no second mask.
    columns = tl.minimum(columns, OUT - 1)
    prefetch_rows(w_ptr, columns, 0, SIZE, AHEAD, CHAINED)
    if GATED:
        prefetch_rows(w_ptr + OUT * SIZE, columns, 0, SIZE, AHEAD, CHAINED)
    return columns, live_columns


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
    HAS_BIAS: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    columns, live_columns = take_columns(w_ptr, OUT, SIZE, GATED, TILE_N, AHEAD, CHAINED)
    follow(CHAINED)
    products = tl.zeros([TILE_N, TILE_K], tl.float32)
    up_products = tl.zeros([TILE_N, TILE_K], tl.float32)
    for k in range(0, SIZE, TILE_K):
        at = k + tl.arange(0, TILE_K)
        live = at < SIZE
        x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        products = _dot_row(products, x, w_ptr, columns, at, live, SIZE)
        if GATED:
            up_products = _dot_row(up_products, x, w_ptr + OUT * SIZE, columns, at, live, SIZE)
    y, up = tl.sum(products, 1), tl.sum(up_products, 1)
    leave_columns(out_ptr, bias_ptr, columns, live_columns, y, up, OUT, GATED, HAS_BIAS)


def one_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool, tiles: Tiles | None = None
) -> Tensor:
    """x [1, in_size], weight [out_size, in_size] -> [1, out_size], or half of that if gated."""
    in_size, out_size = x.shape[1], weight.shape[0] // (1 + gated)
    tiles = tiles or one_row_tiles(in_size, gated=gated)
    out = torch.empty((1, out_size), dtype=x.dtype, device=x.device)
    _one_row_kernel[(triton.cdiv(out_size, tiles.tile_n),)](
        out, x, weight, weight if bias is None else bias,
        OUT=out_size, SIZE=in_size, GATED=gated, HAS_BIAS=bias is not None,
        TILE_N=tiles.tile_n, TILE_K=tiles.tile_k,
        AHEAD=one_row_ahead(weight.numel()), num_warps=tiles.num_warps, **chained(),
    )  # fmt: skip
    return out
