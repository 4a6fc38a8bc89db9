"""y = x W^T for few rows, where the time is that of reading W once. CUDA, Triton.

One row is summed as products in registers. Two to ``MAX_ROWS`` rows go through the matrix units;
there the sum over input features is split over programs until they fill the device, and the
program that arrives last adds the parts up in order, so results repeat bit for bit. Within either
kernel a row's sum depends on the shape of W alone, not on the rows beside it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lockstep.comm.all_reduce.base import AddNorm
from lockstep.parallel.placement import TorchLinear
from lockstep.worker.kernels.activation import silu_and_mul
from lockstep.worker.kernels.chain import chained, follow, prefetch_rows
from lockstep.worker.kernels.normed_row import normed_row

MAX_ROWS = 16
ENOUGH_PROGRAMS = 256
_PART_FLOATS = 1 << 20
# Larger weights keep the device busy from kernel to kernel: fetching them ahead would only take
# bandwidth from the kernel that runs, and with several rows an early start does so too.
SMALL_WEIGHT = 1 << 23
LEAST_AHEAD = 64  # elements: one line of a row


@triton.jit
def _dot_row(
    y, x, w_ptr, columns, at, live, SIZE: tl.constexpr
):  # fmt: skip
    w = tl.load(w_ptr + columns[:, None] * SIZE + at[None, :], mask=live[None, :], other=0.0)
    return y + w.to(tl.float32) * x[None, :]


@triton.jit
def _one_row_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, OUT: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    live_columns = columns < OUT
    # Columns past the last repeat it: the stream of weights then needs no second mask.
    columns = tl.minimum(columns, OUT - 1)
    prefetch_rows(w_ptr, columns, 0, SIZE, AHEAD, CHAINED)
    if GATED:
        prefetch_rows(w_ptr + OUT * SIZE, columns, 0, SIZE, AHEAD, CHAINED)
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
    y = tl.sum(products, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns).to(tl.float32)
    if GATED:
        up = tl.sum(up_products, 1)
        if HAS_BIAS:
            up += tl.load(bias_ptr + OUT + columns).to(tl.float32)
        y = y * tl.sigmoid(y) * up
    tl.store(out_ptr + columns, y.to(out_ptr.dtype.element_ty), mask=live_columns)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    out_ptr, x_ptr, w_ptr, bias_ptr, part_ptr, arrivals_ptr, num_rows,
    OUT: tl.constexpr, SIZE: tl.constexpr, X_ROW: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, AHEAD: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, TILE_M)
    live_rows = rows < num_rows
    columns = tile.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    live_columns = columns < OUT
    columns = tl.minimum(columns, OUT - 1)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    up = tl.zeros([TILE_M, TILE_N], tl.float32)
    begin = split * SPLIT_SIZE
    prefetch_rows(w_ptr, columns, begin, SIZE, AHEAD, CHAINED)
    if GATED:
        prefetch_rows(w_ptr + OUT * SIZE, columns, begin, SIZE, AHEAD, CHAINED)
    follow(CHAINED)
    for k in range(begin, tl.minimum(begin + SPLIT_SIZE, SIZE), TILE_K):
        at = k + tl.arange(0, TILE_K)
        live = at < SIZE
        x = tl.load(
            x_ptr + rows[:, None] * X_ROW + at[None, :],
            mask=live_rows[:, None] & live[None, :], other=0.0,
        )  # fmt: skip
        places = w_ptr + columns[None, :] * SIZE + at[:, None]
        w = tl.load(places, mask=live[:, None], other=0.0)
        acc = tl.dot(x, w, acc)
        if GATED:
            up_w = tl.load(places + OUT * SIZE, mask=live[:, None], other=0.0)
            up = tl.dot(x, up_w, up)
    if SPLITS > 1:
        TILE: tl.constexpr = TILE_M * TILE_N
        PART: tl.constexpr = TILE * 2 if GATED else TILE
        inside = rows[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
        parts = part_ptr + tile * (SPLITS * PART) + inside
        tl.store(parts + split * PART, acc)
        if GATED:
            tl.store(parts + split * PART + TILE, up)
        # All threads' parts come before the one thread's release below.
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(arrivals_ptr + tile, 0)
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
        up = tl.zeros([TILE_M, TILE_N], tl.float32)
        for part in tl.static_range(SPLITS):
            acc += tl.load(parts + part * PART, cache_modifier=".cg")
            if GATED:
                up += tl.load(parts + part * PART + TILE, cache_modifier=".cg")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns).to(tl.float32)[None, :]
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias_ptr + OUT + columns).to(tl.float32)[None, :]
        acc = acc * tl.sigmoid(acc) * up
    tl.store(
        out_ptr + rows[:, None] * OUT + columns[None, :], acc.to(out_ptr.dtype.element_ty),
        mask=live_rows[:, None] & live_columns[None, :],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program takes: ``tile_n`` output by ``tile_k`` input features at a time."""

    tile_n: int
    tile_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


def one_row_tiles(in_size: int, *, gated: bool) -> Tiles:
    """Sixteen kilobytes of weights in flight a program; the best of "tune" on an H200."""
    width = triton.next_power_of_2(in_size)
    return Tiles(2, min(4096, width)) if gated else Tiles(4, min(2048, width), num_warps=8)


def normed_row_tiles(weight: Tensor, *, gated: bool) -> dict[str, int]:
    """As launch options. Short rows leave room for more of them, which share the sum of squares."""
    size = weight.shape[1]
    width = triton.next_power_of_2(size)
    tile_n = 2 if gated or size > 1024 else 8
    ahead = _ahead(size) if weight.numel() <= SMALL_WEIGHT else LEAST_AHEAD
    return {"TILE_N": tile_n, "TILE_K": min(4096, width), "AHEAD": ahead, "num_warps": 4}


def few_rows_tiles(out_size: int, in_size: int, *, gated: bool) -> Tiles:
    """Two tiles of 32 KB in flight a program, and splits where the tiles leave the device idle."""
    if gated and out_size * in_size > SMALL_WEIGHT:
        return Tiles(64, 128, num_stages=5)
    tile_n, tile_k = 32, 256
    num_tiles = triton.cdiv(out_size, tile_n)
    splits = min(ENOUGH_PROGRAMS // num_tiles, triton.cdiv(in_size, tile_k))
    # Adding parts up costs more than a device that is three quarters full, unless sums are long.
    enough = 132 if in_size >= 4096 else 96
    return Tiles(tile_n, tile_k, max(1, splits) if num_tiles < enough else 1, num_stages=4)


def _ahead(size: int) -> int:
    """Elements of a row to prefetch: all of it, but no more than the cache can hold for long."""
    padded: int = triton.next_power_of_2(size)
    return max(LEAST_AHEAD, min(padded, 4096))


class FewRowsLinear:
    """The two kernels and the workspace they share; its calls must be on one stream.

    ``arrivals`` is all zero between launches: the last program of a tile resets its count.
    """

    def __init__(self, device: torch.device) -> None:
        self._parts = torch.empty(_PART_FLOATS, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(ENOUGH_PROGRAMS, dtype=torch.int32, device=device)

    def serves(self, x: Tensor, weight: Tensor) -> bool:
        """x [rows, in_size] and weight [out_size, in_size], both of one half type."""
        return (
            not torch.compiler.is_compiling()
            and 0 < x.shape[0] <= MAX_ROWS
            and x.dtype == weight.dtype
            and x.element_size() == 2
            and x.shape[1] % 8 == 0
            and x.stride(1) == 1
            and weight.is_contiguous()
        )

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tiles: Tiles | None = None
    ) -> Tensor:
        """x @ weight.T + bias, [rows, out_size], accumulated in float32 and rounded once."""
        return self._run(x, weight, bias, weight.shape[0], gated=False, tiles=tiles)

    def gated(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tiles: Tiles | None = None
    ) -> Tensor:
        """silu(gate) * up of x @ weight.T + bias, gate first, without rounding in between."""
        return self._run(x, weight, bias, weight.shape[0] // 2, gated=True, tiles=tiles)

    def _run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_size: int,
        *,
        gated: bool,
        tiles: Tiles | None,
    ) -> Tensor:
        num_rows, in_size = x.shape
        out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
        shape = {"OUT": out_size, "SIZE": in_size, "GATED": gated, "HAS_BIAS": bias is not None}
        small = weight.numel() <= SMALL_WEIGHT
        if num_rows == 1:
            tiles = tiles or one_row_tiles(in_size, gated=gated)
            _one_row_kernel[(triton.cdiv(out_size, tiles.tile_n),)](
                out, x, weight, weight if bias is None else bias, **shape,
                TILE_N=tiles.tile_n, TILE_K=tiles.tile_k,
                AHEAD=_ahead(in_size) if small else LEAST_AHEAD,
                num_warps=tiles.num_warps, **chained(),
            )  # fmt: skip
            return out
        tiles = tiles or few_rows_tiles(out_size, in_size, gated=gated)
        num_tiles = triton.cdiv(out_size, tiles.tile_n)
        split_size = triton.cdiv(in_size, tiles.splits * tiles.tile_k) * tiles.tile_k
        splits = triton.cdiv(in_size, split_size)
        self._check_space(num_tiles, splits, MAX_ROWS * tiles.tile_n * (1 + gated))
        _few_rows_kernel[(num_tiles, splits)](
            out, x, weight, weight if bias is None else bias, self._parts, self._arrivals,
            num_rows, **shape, X_ROW=x.stride(0), SPLITS=splits, SPLIT_SIZE=split_size,
            TILE_M=MAX_ROWS, TILE_N=tiles.tile_n, TILE_K=tiles.tile_k, AHEAD=_ahead(split_size),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **chained(pays=small),
        )  # fmt: skip
        return out

    def _check_space(self, num_tiles: int, splits: int, floats_per_part: int) -> None:
        floats, limit = num_tiles * splits * floats_per_part, self._parts.numel()
        if splits > 1 and (floats > limit or num_tiles > self._arrivals.numel()):
            raise ValueError(
                f"splits must leave {num_tiles} tiles of {floats_per_part} floats within "
                f"{self._arrivals.numel()} tiles and {limit} floats, got {splits}"
            )


class KernelLinear:
    """``LinearOps`` on CUDA: these kernels where they serve, torch's matrix products elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._few_rows = FewRowsLinear(device)
        self._torch = TorchLinear()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._few_rows.serves(x, weight):
            return self._few_rows(x, weight, bias)
        return F.linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._few_rows.serves(x, weight):
            return self._few_rows.gated(x, weight, bias)
        if torch.compiler.is_compiling():  # makes a kernel of its own
            return self._torch.gated(x, weight, bias)
        return silu_and_mul(F.linear(x, weight, bias))

    def of_norm(
        self, x: Tensor, residual: Tensor, norm: AddNorm, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(product with the norm of x + residual, that sum)."""
        if self._is_one_row(x, weight):
            tiles = normed_row_tiles(weight, gated=False)
            return normed_row(x, residual, norm, weight, bias, tiles, gated=False)
        normed, total = norm.add(x, residual)
        return self(normed, weight, bias), total

    def gated_of_norm(
        self, x: Tensor, residual: Tensor, norm: AddNorm, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(``gated`` of the norm of x + residual, that sum)."""
        if self._is_one_row(x, weight):
            tiles = normed_row_tiles(weight, gated=True)
            return normed_row(x, residual, norm, weight, bias, tiles, gated=True)
        normed, total = norm.add(x, residual)
        return self.gated(normed, weight, bias), total

    def _is_one_row(self, x: Tensor, weight: Tensor) -> bool:
        return x.shape[0] == 1 and self._few_rows.serves(x, weight)
