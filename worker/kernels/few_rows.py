"""y = x W^T for 2 to 128 rows through the matrix units. CUDA, Triton.

The units' wide side takes the weights and their narrow one the rows, padded to lanes. Tiles of both
come by tensor descriptors, which read zeros beyond the edges. The sum over input features may be
split over programs; the one that arrives last adds the parts up in order, so results repeat bit for
bit. A row's sum depends on the shape of W and on the number of lanes, never on other rows.

An RMSNorm between two such products is half in each. The first adds the residual, multiplies by the
norm's weight and leaves sums of squares. What makes a row's square sum one is the same for all its
numbers, so the second multiplies its results by it: no kernel waits for whole rows in between.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.comm.all_reduce.base import AddNorm
from lockstep.parallel.placement import NormedSum
from lockstep.worker.kernels.chain import chained, follow, prefetch_rows
from lockstep.worker.kernels.linear_tiles import (
    Tiles,
    few_rows_ahead,
    few_rows_tiles,
    lanes_of,
)

MAX_SPLIT_TILES = 256
_PART_FLOATS = 1 << 21


@triton.jit
def _places(columns, num_rows, OUT: tl.constexpr, LANES: tl.constexpr):
    """Where in [rows, OUT] the numbers of a tile are, each [LANES, columns], and which exist."""
    lanes = tl.arange(0, LANES)
    live = (lanes < num_rows)[:, None] & (columns < OUT)[None, :]
    return lanes[:, None] * OUT + columns[None, :], live


@triton.jit
def _load_squares(squares_ptr, NUM_SQUARES: tl.constexpr, LANES: tl.constexpr):
    """[tiles, LANES], zeros past the last tile."""
    tiles = tl.arange(0, triton.next_power_of_2(NUM_SQUARES))
    at = tiles[:, None] * LANES + tl.arange(0, LANES)[None, :]
    return tl.load(squares_ptr + at, mask=(tiles < NUM_SQUARES)[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    out_ptr, x_tiles, w_tiles, w_ptr, bias_ptr, part_ptr, arrivals_ptr, num_rows,
    OUT: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_SIZE: tl.constexpr, LANES: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, AHEAD: tl.constexpr, CHAINED: tl.constexpr,
    residual_ptr=None, norm_ptr=None, total_ptr=None, squares_ptr=None, eps=0.0,
    NUM_SQUARES: tl.constexpr = 0,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    first_column, begin = tile * TILE_N, split * SPLIT_SIZE
    columns = first_column + tl.arange(0, TILE_N)
    # For what is read by pointer: columns past the last repeat it.
    inside_columns = tl.minimum(columns, OUT - 1)
    prefetch_rows(w_ptr, inside_columns, begin, SIZE, AHEAD, CHAINED)
    if GATED:
        prefetch_rows(w_ptr + OUT * SIZE, inside_columns, begin, SIZE, AHEAD, CHAINED)
    acc = tl.zeros([TILE_N, LANES], tl.float32)
    up = tl.zeros([TILE_N, LANES], tl.float32)
    follow(CHAINED)
    # What the end needs arrives while the weights stream by.
    if residual_ptr is not None:
        places, live = _places(columns, num_rows, OUT, LANES)
        residual = tl.load(residual_ptr + places, mask=live, other=0.0)
        norm_weight = tl.load(norm_ptr + columns, mask=columns < OUT, other=0.0)
    if NUM_SQUARES > 0:
        squares = _load_squares(squares_ptr, NUM_SQUARES, LANES)
    for k in range(begin, tl.minimum(begin + SPLIT_SIZE, SIZE), TILE_K):
        x = x_tiles.load([0, k]).T
        acc = tl.dot(w_tiles.load([first_column, k]), x, acc)
        if GATED:
            up = tl.dot(w_tiles.load([OUT + first_column, k]), x, up)
    lanes = tl.arange(0, LANES)
    if SPLITS > 1:
        TILE: tl.constexpr = TILE_N * LANES
        PART: tl.constexpr = TILE * 2 if GATED else TILE
        inside = tl.arange(0, TILE_N)[:, None] * LANES + lanes[None, :]
        parts = part_ptr + tile.to(tl.int64) * (SPLITS * PART) + inside
        tl.store(parts + split * PART, acc)
        if GATED:
            tl.store(parts + split * PART + TILE, up)
        # All threads' parts come before the one thread's release below.
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(arrivals_ptr + tile, 0)
        acc = tl.zeros([TILE_N, LANES], tl.float32)
        up = tl.zeros([TILE_N, LANES], tl.float32)
        for part in tl.static_range(SPLITS):
            acc += tl.load(parts + part * PART, cache_modifier=".cg")
            if GATED:
                up += tl.load(parts + part * PART + TILE, cache_modifier=".cg")
    if NUM_SQUARES > 0:
        scale = tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)[None, :]
        acc *= scale
        if GATED:
            up *= scale
    if HAS_BIAS:
        acc += tl.load(bias_ptr + inside_columns).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias_ptr + OUT + inside_columns).to(tl.float32)[:, None]
        acc = acc * tl.sigmoid(acc) * up
    places, live = _places(columns, num_rows, OUT, LANES)
    y = acc.T.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        # The norm must see what later layers will see: the sum after rounding.
        total = (y.to(tl.float32) + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + places, total, mask=live)
        wide = total.to(tl.float32)
        tl.store(squares_ptr + tile * LANES + lanes, tl.sum(wide * wide, 1))
        y = (wide * norm_weight.to(tl.float32)[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, y, mask=live)


@dataclass(frozen=True, slots=True)
class HalfNormed:
    """Rows that are normed but for a factor each, which ``squares`` and ``eps`` give.

    ``weighed`` is ``total`` times the norm's weight, both [rows, size]. ``squares`` [tiles, lanes]
    float32 holds the sum of squares of ``total`` over the columns of each tile.
    """

    weighed: Tensor
    total: Tensor
    squares: Tensor
    eps: float


class FewRows:
    """The kernel and its workspace; its calls must be on one stream.

    ``arrivals`` is all zero between launches: the last program of a tile resets its count.
    """

    def __init__(self, device: torch.device) -> None:
        self._parts = torch.empty(_PART_FLOATS, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gated: bool,
        tiles: Tiles | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x [rows, in_size], weight [out_size, in_size] -> [rows, out_size], half if gated.

        Into ``out``, if there is one: contiguous, of any float type.

        Raises:
            ValueError: more splits than the workspace holds.
        """
        tiles = tiles or _tiles_of(x, weight, gated=gated)
        return self._run(x, weight, bias, tiles, gated=gated, out=out)

    def of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        """(product with the norm, total), as ``LinearOps.of_norm``, gated or not."""
        half = self.add(summed.x, summed.weight, summed.residual, summed.norm)
        tiles = _tiles_of(half.weighed, weight, gated=gated)
        product = self._run(
            half.weighed, weight, bias, tiles, gated=gated,
            squares_ptr=half.squares, eps=half.eps, NUM_SQUARES=half.squares.shape[0],
        )  # fmt: skip
        return product, half.total

    def add(
        self,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        norm: AddNorm,
        *,
        tiles: Tiles | None = None,
    ) -> HalfNormed:
        """x @ weight.T, rounded, plus contiguous ``residual`` [rows, size], half normed."""
        tiles = tiles or _tiles_of(x, weight, gated=False)
        num_tiles = triton.cdiv(weight.shape[0], tiles.tile_n)
        shape = (num_tiles, lanes_of(x.shape[0]))
        squares = torch.empty(shape, dtype=torch.float32, device=x.device)
        total = torch.empty_like(residual)
        weighed = self._run(
            x, weight, None, tiles, gated=False, residual_ptr=residual,
            norm_ptr=norm.weight, total_ptr=total, squares_ptr=squares,
        )  # fmt: skip
        return HalfNormed(weighed, total, squares, norm.eps)

    def _run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tiles: Tiles,
        *,
        gated: bool,
        out: Tensor | None = None,
        **half_norm: Tensor | float,
    ) -> Tensor:
        (num_rows, in_size), out_size = x.shape, weight.shape[0] // (1 + gated)
        lanes = lanes_of(num_rows)
        num_tiles = triton.cdiv(out_size, tiles.tile_n)
        split_size = triton.cdiv(in_size, tiles.splits * tiles.tile_k) * tiles.tile_k
        splits = triton.cdiv(in_size, split_size)
        self._check_space(num_tiles, splits, lanes * tiles.tile_n * (1 + gated))
        if out is None:
            out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
        _few_rows_kernel[(num_tiles, splits)](
            out, TensorDescriptor.from_tensor(x, [lanes, tiles.tile_k]),
            TensorDescriptor.from_tensor(weight, [tiles.tile_n, tiles.tile_k]),
            weight, weight if bias is None else bias, self._parts, self.arrivals, num_rows,
            OUT=out_size, SIZE=in_size, GATED=gated, HAS_BIAS=bias is not None, SPLITS=splits,
            SPLIT_SIZE=split_size, LANES=lanes, TILE_N=tiles.tile_n, TILE_K=tiles.tile_k,
            AHEAD=few_rows_ahead(weight.shape[0] * splits, split_size),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **half_norm, **chained(),
        )  # fmt: skip
        return out

    def _check_space(self, num_tiles: int, splits: int, floats_per_part: int) -> None:
        floats, limit = num_tiles * splits * floats_per_part, self._parts.numel()
        if splits > 1 and (floats > limit or num_tiles > self.arrivals.numel()):
            raise ValueError(
                f"splits must leave {num_tiles} tiles of {floats_per_part} floats within "
                f"{self.arrivals.numel()} tiles and {limit} floats, got {splits}"
            )


def _tiles_of(x: Tensor, weight: Tensor, *, gated: bool) -> Tiles:
    (num_rows, in_size), out_size = x.shape, weight.shape[0] // (1 + gated)
    return few_rows_tiles(out_size, in_size, lanes_of(num_rows), gated=gated)
