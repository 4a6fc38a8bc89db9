"""y = x W^T for 2 to 128 rows through the matrix units. CUDA, Triton.

The units' wide side takes the weights and their narrow one the rows, padded to lanes. Tiles of both
come by tensor descriptors, which read zeros beyond the edges. The sum over input features may be
split over programs; the one that arrives last adds the parts up in order, so results repeat bit for
bit. A row's sum depends on the shape of W and on the number of lanes, never on other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep.worker.kernels.chain import chained, follow, prefetch_rows
from lockstep.worker.kernels.linear_tiles import (
    Tiles,
    few_rows_ahead,
    few_rows_tiles,
    lanes_of,
)

MAX_SPLIT_TILES = 256
_PART_FLOATS = 1 << 21


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    out_ptr, x_tiles, w_tiles, w_ptr, bias_ptr, part_ptr, arrivals_ptr, num_rows,
    OUT: tl.constexpr, SIZE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_SIZE: tl.constexpr, LANES: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, AHEAD: tl.constexpr, CHAINED: tl.constexpr,
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
    if HAS_BIAS:
        acc += tl.load(bias_ptr + inside_columns).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias_ptr + OUT + inside_columns).to(tl.float32)[:, None]
        acc = acc * tl.sigmoid(acc) * up
    tl.store(
        out_ptr + lanes[:, None] * OUT + columns[None, :],
        acc.T.to(out_ptr.dtype.element_ty),
        mask=(lanes < num_rows)[:, None] & (columns < OUT)[None, :],
    )


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
    ) -> Tensor:
        """x [rows, in_size], weight [out_size, in_size] -> [rows, out_size], half if gated.

        Raises:
            ValueError: more splits than the workspace holds.
        """
        (num_rows, in_size), out_size = x.shape, weight.shape[0] // (1 + gated)
        lanes = lanes_of(num_rows)
        tiles = tiles or few_rows_tiles(out_size, in_size, lanes, gated=gated)
        num_tiles = triton.cdiv(out_size, tiles.tile_n)
        split_size = triton.cdiv(in_size, tiles.splits * tiles.tile_k) * tiles.tile_k
        splits = triton.cdiv(in_size, split_size)
        self._check_space(num_tiles, splits, lanes * tiles.tile_n * (1 + gated))
        out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
        _few_rows_kernel[(num_tiles, splits)](
            out, TensorDescriptor.from_tensor(x, [lanes, tiles.tile_k]),
            TensorDescriptor.from_tensor(weight, [tiles.tile_n, tiles.tile_k]),
            weight, weight if bias is None else bias, self._parts, self.arrivals, num_rows,
            OUT=out_size, SIZE=in_size, GATED=gated, HAS_BIAS=bias is not None, SPLITS=splits,
            SPLIT_SIZE=split_size, LANES=lanes, TILE_N=tiles.tile_n, TILE_K=tiles.tile_k,
            AHEAD=few_rows_ahead(weight.shape[0] * splits, split_size),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **chained(),
        )  # fmt: skip
        return out

    def _check_space(self, num_tiles: int, splits: int, floats_per_part: int) -> None:
        floats, limit = num_tiles * splits * floats_per_part, self._parts.numel()
        if splits > 1 and (floats > limit or num_tiles > self.arrivals.numel()):
            raise ValueError(
                f"splits must leave {num_tiles} tiles of {floats_per_part} floats within "
                f"{self.arrivals.numel()} tiles and {limit} floats, got {splits}"
            )
