"""y = x W^T for 2 to 128 rows through the matrix units. CUDA, Triton's Gluon.

A row's sum depends on the shape of W and on the number of lanes, never on other rows. The kernel is
in ``few_rows_kernel``.

An RMSNorm between two such products is half in each. The first adds the residual, multiplies by the
norm's weight and leaves sums of squares. What makes a row's square sum one is the same for all its
numbers, so the second multiplies its results by it: no kernel waits for whole rows in between.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lockstep.comm.all_reduce.base import AddNorm
from lockstep.parallel.placement import NormedSum
from lockstep.worker.kernels.chain import chained
from lockstep.worker.kernels.few_rows_kernel import few_rows_kernel
from lockstep.worker.kernels.linear_tiles import (
    Ring,
    few_rows_ring,
    lanes_of,
    starts_next_first,
)

MAX_SPLIT_TILES = 256
_PART_FLOATS = 1 << 21


def _tiles(matrix: Tensor, rows: int, width: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([rows, width], gl.bfloat16)  # any half type's
    return TensorDescriptor.from_tensor(matrix, [rows, width], layout)


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
        ring: Ring | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x [rows, in_size], weight [out_size, in_size] -> [rows, out_size], half if gated.

        Into ``out``, if there is one: contiguous, of any float type.

        Raises:
            ValueError: more splits than the workspace holds.
        """
        ring = ring or _ring_of(x, weight, gated=gated)
        return self._run(x, weight, bias, ring, gated=gated, out=out)

    def of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        """(product with the norm, total), as ``LinearOps.of_norm``, gated or not."""
        half = self.add(summed.x, summed.weight, summed.residual, summed.norm)
        ring = _ring_of(half.weighed, weight, gated=gated)
        product = self._run(
            half.weighed, weight, bias, ring, gated=gated,
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
        ring: Ring | None = None,
    ) -> HalfNormed:
        """x @ weight.T, rounded, plus contiguous ``residual`` [rows, size], half normed."""
        ring = ring or _ring_of(x, weight, gated=False)
        shape = (triton.cdiv(weight.shape[0], ring.columns), lanes_of(x.shape[0]))
        squares = torch.empty(shape, dtype=torch.float32, device=x.device)
        total = torch.empty_like(residual)
        weighed = self._run(
            x, weight, None, ring, gated=False, residual_ptr=residual,
            norm_ptr=norm.weight, total_ptr=total, squares_ptr=squares,
        )  # fmt: skip
        return HalfNormed(weighed, total, squares, norm.eps)

    def _run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ring: Ring,
        *,
        gated: bool,
        out: Tensor | None = None,
        **half_norm: Tensor | float,
    ) -> Tensor:
        (num_rows, in_size), out_size = x.shape, weight.shape[0] // (1 + gated)
        lanes = lanes_of(num_rows)
        num_tiles = triton.cdiv(out_size, ring.columns)
        split_size = triton.cdiv(in_size, ring.splits * ring.tile_k) * ring.tile_k
        splits = triton.cdiv(in_size, split_size)
        self._check_space(num_tiles, splits, lanes * ring.tile_n * (1 + gated))
        if out is None:
            out = torch.empty((num_rows, out_size), dtype=x.dtype, device=x.device)
        few_rows_kernel[(num_tiles, splits)](
            out, _tiles(x, lanes, ring.tile_k), _tiles(weight, ring.tile_n, ring.tile_k),
            weight if bias is None else bias, self._parts, self.arrivals, num_rows,
            OUT=out_size, SIZE=in_size, GATED=gated, HAS_BIAS=bias is not None, SPLITS=splits,
            SPLIT_SIZE=split_size, LANES=lanes, COLUMNS=ring.columns, TILE_K=ring.tile_k,
            STAGES=ring.num_stages, NEXT_FIRST=starts_next_first(weight.numel(), lanes),
            num_warps=ring.num_warps, **half_norm, **chained(),
        )  # fmt: skip
        return out

    def _check_space(self, num_tiles: int, splits: int, floats_per_part: int) -> None:
        floats, limit = num_tiles * splits * floats_per_part, self._parts.numel()
        if splits > 1 and (floats > limit or num_tiles > self.arrivals.numel()):
            raise ValueError(
                f"splits must leave {num_tiles} tiles of {floats_per_part} floats within "
                f"{self.arrivals.numel()} tiles and {limit} floats, got {splits}"
            )


def _ring_of(x: Tensor, weight: Tensor, *, gated: bool) -> Ring:
    (num_rows, in_size), out_size = x.shape, weight.shape[0] // (1 + gated)
    return few_rows_ring(out_size, in_size, lanes_of(num_rows), gated=gated)
