"""The kernel of products of few rows: a ring of weights that is full before its turn. Gluon, CUDA.

The matrix units' wide side takes the weights and their narrow one the rows, padded to lanes. Tiles
of both come by tensor descriptors, which read zeros beyond the edges, into slots in shared memory.
Weights fill them before the kernel ahead has ended, and a tile that is used up makes room for the
next at once, so the memory has work from kernel to kernel. The sum over input features may be split
over programs; the one that arrives last adds the parts up in order, so results repeat bit for bit.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lockstep.worker.kernels.chain import follow
from lockstep.worker.kernels.linear_tiles import WARP_N


@gluon.constexpr_function
def _features(num_warps: int) -> int:
    """Output features of a tile."""
    return WARP_N * num_warps


@gluon.constexpr_function
def _units(lanes: int, num_warps: int) -> gl.NVMMADistributedLayout:
    """How the matrix units leave [features, lanes]."""
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, lanes, 16])


@gluon.constexpr_function
def _flat(lanes: int, num_warps: int) -> gl.BlockedLayout:
    """[features, lanes], neighbouring features in one thread: they are neighbours in memory."""
    width = min(8, WARP_N * lanes // 32)
    threads = WARP_N * num_warps // width
    return gl.BlockedLayout([width, 1], [threads, 32 // threads], [1, num_warps], [0, 1])


@gluon.constexpr_function
def _square_rows(lanes: int, num_warps: int) -> gl.BlockedLayout:
    """[tiles, lanes] of sums of squares."""
    return gl.BlockedLayout([1, 4], [128 // lanes, lanes // 4], [num_warps, 1], [1, 0])


@gluon.jit
def _ask_weights(
    tiles, ring, up_ring, bars, slot, row, k, wanted, OUT: gl.constexpr, GATED: gl.constexpr,
    STAGE_BYTES: gl.constexpr,
):  # fmt: skip
    """Have the weights of features from ``row`` and ``k`` on, and those of up, copied to a slot."""
    bar = bars.index(slot)
    mbarrier.expect(bar, STAGE_BYTES, wanted)
    tma.async_copy_global_to_shared(tiles, [row, k], bar, ring.index(slot), wanted)
    if GATED:
        tma.async_copy_global_to_shared(tiles, [OUT + row, k], bar, up_ring.index(slot), wanted)


@gluon.jit
def _ask_rows(tiles, ring, bars, slot, k, wanted):
    """The same for the rows; their bytes are expected already."""
    tma.async_copy_global_to_shared(tiles, [0, k], bars.index(slot), ring.index(slot), wanted)


@gluon.jit
def _load_squares(squares_ptr, NUM: gl.constexpr, LANES: gl.constexpr):
    """[tiles, LANES], zeros past the last tile."""
    LAYOUT: gl.constexpr = _square_rows(LANES, gl.num_warps())
    tiles = gl.arange(0, triton.next_power_of_2(NUM), gl.SliceLayout(1, LAYOUT))
    at = tiles[:, None] * LANES + gl.arange(0, LANES, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(squares_ptr + at, mask=(tiles < NUM)[:, None], other=0.0)


@triton.jit
def _meet():
    """A barrier of the program's threads; Gluon's has another name in each release."""
    tl.debug_barrier()


@gluon.jit
def _multiply(
    w_tiles, x_tiles, ring, up_ring, x_ring, bars, first, begin, num_tiles,
    OUT: gl.constexpr, GATED: gl.constexpr, LANES: gl.constexpr, TILE_K: gl.constexpr,
    STAGES: gl.constexpr, STAGE_BYTES: gl.constexpr,
):  # fmt: skip
    """Sums [features, LANES] over all tiles, of the weights and of up; up's are 0 if plain.

    The first tiles are on their way to the ring's slots.
    """
    UNITS: gl.constexpr = _units(LANES, gl.num_warps())
    TILE_N: gl.constexpr = _features(gl.num_warps())
    acc = gl.zeros([TILE_N, LANES], gl.float32, UNITS)
    up_acc = gl.zeros([TILE_N, LANES], gl.float32, UNITS)
    for i in range(num_tiles):
        slot = i % STAGES
        mbarrier.wait(bars.index(slot), i // STAGES & 1)
        x = x_ring.index(slot).permute((1, 0))
        acc = warpgroup_mma(ring.index(slot), x, acc, is_async=True)
        # The tile before this one is used up once no more than this one's products run.
        if GATED:
            up_acc = warpgroup_mma(up_ring.index(slot), x, up_acc, is_async=True)
            acc, up_acc = warpgroup_mma_wait(2, deps=[acc, up_acc])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        ahead = i - 1 + STAGES
        free, k = ahead % STAGES, begin + ahead * TILE_K
        wanted = (i > 0) & (ahead < num_tiles)
        _ask_weights(w_tiles, ring, up_ring, bars, free, first, k, wanted, OUT, GATED, STAGE_BYTES)
        _ask_rows(x_tiles, x_ring, bars, free, k, wanted)
    if GATED:
        acc, up_acc = warpgroup_mma_wait(0, deps=[acc, up_acc])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, up_acc


@gluon.jit
def _leave_part(parts, split, y, up, GATED: gl.constexpr, PART: gl.constexpr):
    """Store the sums of this split; those of up behind them."""
    gl.store(parts + split * PART, y)
    if GATED:
        gl.store(parts + split * PART + PART // 2, up)
    # All threads' parts come before the one thread's release that follows.
    _meet()


@gluon.jit
def _add_parts(parts, SPLITS: gl.constexpr, PART: gl.constexpr):
    total = gl.load(parts, cache_modifier=".cg")
    for part in gl.static_range(1, SPLITS):
        total += gl.load(parts + part * PART, cache_modifier=".cg")
    return total


@gluon.jit
def _finish(
    y, up, bias_ptr, columns, mine, OUT: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr
):  # fmt: skip
    """y, or silu(y) * up, of sums without their bias."""
    if HAS_BIAS:
        y += gl.load(bias_ptr + columns, mask=mine, other=0.0).to(gl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            up += gl.load(bias_ptr + OUT + columns, mask=mine, other=0.0).to(gl.float32)[:, None]
        y = y / (1.0 + gl.exp(-y)) * up
    return y


@gluon.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    out_ptr, x_tiles, w_tiles, bias_ptr, part_ptr, arrivals_ptr, num_rows,
    OUT: gl.constexpr, SIZE: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    SPLITS: gl.constexpr, SPLIT_SIZE: gl.constexpr, LANES: gl.constexpr, COLUMNS: gl.constexpr,
    TILE_K: gl.constexpr, STAGES: gl.constexpr, NEXT_FIRST: gl.constexpr, CHAINED: gl.constexpr,
    residual_ptr=None, norm_ptr=None, total_ptr=None, squares_ptr=None, eps=0.0,
    NUM_SQUARES: gl.constexpr = 0,
):  # fmt: skip
    FLAT: gl.constexpr = _flat(LANES, gl.num_warps())
    WEIGHTS: gl.constexpr = 2 if GATED else 1
    TILE_N: gl.constexpr = _features(gl.num_warps())
    STAGE_BYTES: gl.constexpr = (WEIGHTS * TILE_N + LANES) * TILE_K * 2
    tile, split = gl.program_id(0), gl.program_id(1)
    first, begin = tile * COLUMNS, split * SPLIT_SIZE
    num_tiles = gl.cdiv(gl.minimum(SPLIT_SIZE, SIZE - begin), TILE_K)
    ring = gl.allocate_shared_memory(w_tiles.dtype, [STAGES, TILE_N, TILE_K], w_tiles.layout)
    up_ring = ring
    if GATED:
        up_ring = gl.allocate_shared_memory(w_tiles.dtype, [STAGES, TILE_N, TILE_K], w_tiles.layout)
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, LANES, TILE_K], x_tiles.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        _ask_weights(
            w_tiles, ring, up_ring, bars, s, first, begin + s * TILE_K, s < num_tiles, OUT, GATED,
            STAGE_BYTES,
        )  # fmt: skip
    follow(CHAINED, NEXT_FIRST)
    for s in gl.static_range(STAGES):
        _ask_rows(x_tiles, x_ring, bars, s, begin + s * TILE_K, s < num_tiles)

    columns = first + gl.arange(0, TILE_N, gl.SliceLayout(1, FLAT))
    lanes = gl.arange(0, LANES, gl.SliceLayout(0, FLAT))
    mine = columns < gl.minimum(first + COLUMNS, OUT)
    live = mine[:, None] & (lanes < num_rows)[None, :]
    places = columns[:, None] + lanes[None, :] * OUT
    # What the end needs arrives while the weights stream by.
    if residual_ptr is not None:
        residual = gl.load(residual_ptr + places, mask=live, other=0.0)
        norm_weight = gl.load(norm_ptr + columns, mask=mine, other=0.0)
    if NUM_SQUARES > 0:
        squares = _load_squares(squares_ptr, NUM_SQUARES, LANES)
    y, up = _multiply(
        w_tiles, x_tiles, ring, up_ring, x_ring, bars, first, begin, num_tiles,
        OUT, GATED, LANES, TILE_K, STAGES, STAGE_BYTES,
    )  # fmt: skip
    y, up = gl.convert_layout(y, FLAT), gl.convert_layout(up, FLAT)
    if SPLITS > 1:
        PART: gl.constexpr = WEIGHTS * TILE_N * LANES
        inside = (columns - first)[:, None] + lanes[None, :] * TILE_N
        parts = part_ptr + tile.to(gl.int64) * (SPLITS * PART) + inside
        _leave_part(parts, split, y, up, GATED, PART)
        if gl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        gl.store(arrivals_ptr + tile, 0)
        y = _add_parts(parts, SPLITS, PART)
        if GATED:
            up = _add_parts(parts + PART // 2, SPLITS, PART)
    if NUM_SQUARES > 0:
        scale = gl.rsqrt(gl.sum(squares, 0) / SIZE + eps)
        scale = gl.convert_layout(scale, gl.SliceLayout(0, FLAT))[None, :]
        y *= scale
        up *= scale
    y = _finish(y, up, bias_ptr, columns, mine, OUT, GATED, HAS_BIAS).to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        # The norm must see what later layers will see: the sum after rounding.
        total = (y.to(gl.float32) + residual.to(gl.float32)).to(total_ptr.dtype.element_ty)
        gl.store(total_ptr + places, total, mask=live)
        wide = gl.where(mine[:, None], total.to(gl.float32), 0.0)
        gl.store(squares_ptr + tile * LANES + lanes, gl.sum(wide * wide, 0))
        y = (wide * norm_weight.to(gl.float32)[:, None]).to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + places, y, mask=live)
