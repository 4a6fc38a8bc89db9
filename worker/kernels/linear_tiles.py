"""How a product of few rows is cut into programs, as fitted to times on an H200. No torch.

Where a comment gives microseconds they are those of docs/performance.md.
"""

from dataclasses import dataclass

MAX_ROWS = 128

MULTIPROCESSORS = 132
# Of a multiprocessor: bytes that its programs may share, and threads of 64 registers.
SHARED_BYTES = 227 << 10
RESIDENT_THREADS = 1024

# Weights to fetch before the kernel ahead has ended, in bytes over all programs that run at once.
ONE_ROW_AHEAD = 16 << 20
LARGE_ONE_ROW_AHEAD = 1 << 17
FEW_ROWS_AHEAD = 4 << 20
# In elements: what is large enough to keep the device busy from kernel to kernel.
LARGE_WEIGHT = (1 << 23) + 1
LINE = 64  # elements


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program takes: ``tile_n`` output by ``tile_k`` input features at a time."""

    tile_n: int
    tile_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class Ahead:
    """The first ``programs`` fetch ``elements`` of each of their rows ahead."""

    elements: int
    programs: int


def most_rows(num_elements: int, *, gated: bool) -> int:
    """Of a product with a weight of so many elements; beyond, cuBLAS is as fast or faster."""
    if num_elements < LARGE_WEIGHT:
        return 16
    return MAX_ROWS if gated else 32


def lanes_of(num_rows: int) -> int:
    """Rows that the matrix units compute for ``num_rows``: 16, 32, 64 or 128."""
    return max(16, 1 << (num_rows - 1).bit_length())


def one_row_tiles(in_size: int, *, gated: bool) -> Tiles:
    """Sixteen kilobytes of weights in flight a program."""
    width = 1 << (in_size - 1).bit_length()
    return Tiles(2, min(4096, width)) if gated else Tiles(4, min(2048, width), num_warps=8)


def normed_row_tiles(in_size: int, *, gated: bool) -> Tiles:
    """Short rows leave room for more of them, which share the sum of squares."""
    tile_n = 2 if gated or in_size > 1024 else 8
    return Tiles(tile_n, min(4096, 1 << (in_size - 1).bit_length()))


def few_rows_tiles(out_size: int, in_size: int, lanes: int, *, gated: bool) -> Tiles:
    """One program a multiprocessor if the weight allows it, and deep in flight.

    Two that fit beside each other would share one multiprocessor while another is idle: programs
    that start early take the first place they find.

    Args:
        out_size: output features; of a gated product, half the rows of its weight.
    """
    tile_n = _tile_n(out_size, lanes, gated=gated)
    num_tiles = -(-out_size // tile_n)
    splits = 1 if gated else max(1, min(MULTIPROCESSORS // num_tiles, in_size // 256))
    if lanes == 128:
        return Tiles(tile_n, 64, splits)
    tile_k = 128 if gated or splits > 1 else 256
    stage = 2 * tile_k * (tile_n * (1 + gated) + lanes)
    return Tiles(tile_n, tile_k, splits, num_stages=max(3, SHARED_BYTES // 2 // stage + 1))


def _tile_n(out_size: int, lanes: int, *, gated: bool) -> int:
    if gated and lanes <= 32 and out_size >= 96 * 128:
        return 128
    return 32 if gated and out_size < 96 * 64 else 64


def one_row_ahead(tiles: Tiles, out_size: int, in_size: int, *, gated: bool) -> Ahead:
    weight_rows = 1 + gated
    large = weight_rows * out_size * in_size >= LARGE_WEIGHT
    resident = MULTIPROCESSORS * RESIDENT_THREADS // (32 * tiles.num_warps)
    programs = min(-(-out_size // tiles.tile_n), resident)
    budget = LARGE_ONE_ROW_AHEAD if large else ONE_ROW_AHEAD
    return _ahead(budget, programs, tiles.tile_n * weight_rows, in_size)


def few_rows_ahead(
    tiles: Tiles, out_size: int, split_size: int, splits: int, *, gated: bool
) -> Ahead:
    programs = min(-(-out_size // tiles.tile_n) * splits, MULTIPROCESSORS)
    return _ahead(FEW_ROWS_AHEAD, programs, tiles.tile_n * (1 + gated), split_size)


def _ahead(budget: int, programs: int, rows_each: int, row_share: int) -> Ahead:
    if not budget:
        return Ahead(0, 0)
    elements = budget // (2 * programs * rows_each) // LINE * LINE
    return Ahead(max(LINE, min(elements, -(-row_share // LINE) * LINE)), programs)
