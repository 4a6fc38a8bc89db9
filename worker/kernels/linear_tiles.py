"""How a product of few rows is cut into programs, and what they fetch ahead. No torch.

Fitted to times on an H200, which docs/performance.md has.
"""

from dataclasses import dataclass

MAX_ROWS = 128
# More rows are left to cuBLAS, but with a gated weight of at least so many elements.
FEW_ROWS = 64
HUGE_WEIGHT = 1 << 26
# Up to 16 rows of this size or less are normed half in each of two products.
NARROW = 2048
WIDE_ROWS = 32  # rows up to which our kernels are faster where results are float32

# Sums of squares that a program of 128 threads holds in registers beside its product.
MAX_SQUARES = 8192
TILE_N = 64  # output features of a program of few rows

MULTIPROCESSORS = 132
# Programs that are enough to read weights at full speed; so many that several share a
# multiprocessor; the longest sum that is not split for more of them, of 16 rows and of more.
ENOUGH_PROGRAMS = 64
MANY_PROGRAMS = 4 * MULTIPROCESSORS
LONG_PART = 4096, 2048

# What programs may fetch before the kernel ahead has ended. Too much of it takes bandwidth from the
# kernel that runs, and a large weight keeps the device busy from kernel to kernel anyway.
LINE = 64  # elements
FEW_ROWS_AHEAD = 2 << 20  # bytes, over all programs


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program takes: ``tile_n`` output by ``tile_k`` input features at a time."""

    tile_n: int
    tile_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3


def most_rows(num_elements: int, *, gated: bool) -> int:
    """Rows up to which our kernels are faster than cuBLAS, for a weight of so many elements."""
    return MAX_ROWS if gated and num_elements >= HUGE_WEIGHT else FEW_ROWS


def lanes_of(num_rows: int) -> int:
    """Rows that the matrix units compute for ``num_rows``: 16, 32, 64 or 128."""
    return max(16, 1 << (num_rows - 1).bit_length())


def halves_norm(num_rows: int, size: int) -> bool:
    """Whether a norm of so many rows of ``size`` is half in each of the products around it.

    Where few rows meet large weights it is not: while a kernel norms, the product behind it has
    the memory to itself for what it fetches ahead.
    """
    lanes = lanes_of(num_rows)
    fits = -(-size // TILE_N) * lanes <= MAX_SQUARES
    return 1 < num_rows <= FEW_ROWS and fits and (lanes > 16 or size <= NARROW)


def one_row_tiles(in_size: int, *, gated: bool) -> Tiles:
    """Short rows are in flight as a whole: their weights come while the kernel ahead computes."""
    width = 1 << (in_size - 1).bit_length()
    if gated or width > 4096:
        return Tiles(2, min(1024, width))
    return Tiles(4, 2048, num_warps=8) if width == 4096 else Tiles(4096 // width, width)


def normed_row_tiles(in_size: int, *, gated: bool) -> Tiles:
    """Short rows leave room for more of them, which share the sum of squares."""
    tile_n = 2 if gated or in_size > 1024 else 8
    return Tiles(tile_n, min(4096, 1 << (in_size - 1).bit_length()))


def few_rows_tiles(out_size: int, in_size: int, lanes: int, *, gated: bool) -> Tiles:
    """One program a multiprocessor where the weight allows it, with much in flight.

    Programs that start early take the first place they find: two that fit beside each other would
    share one multiprocessor while another idles.

    Args:
        out_size: output features; of a gated product, half the rows of its weight.
    """
    num_tiles = -(-out_size // TILE_N)
    if not gated and num_tiles >= MANY_PROGRAMS:
        return Tiles(TILE_N, 128)
    if not gated:
        splits = _splits(num_tiles, in_size, LONG_PART[lanes > 16])
        return Tiles(TILE_N, 256 if lanes <= 32 else 128, splits, num_stages=4)
    if lanes == MAX_ROWS:
        return Tiles(TILE_N, 64)
    # Of 32 rows no second program fits beside one of three stages either.
    deep = lanes == 32 or (lanes < 32 and num_tiles <= MULTIPROCESSORS)
    return Tiles(TILE_N, 128, num_stages=4 if deep else 3)


def _splits(num_tiles: int, in_size: int, long_part: int) -> int:
    """Adding up takes time: a sum is split for want of programs, or where its parts are long."""
    wanted = max(-(-ENOUGH_PROGRAMS // num_tiles), -(-in_size // long_part))
    return max(1, min(wanted, MULTIPROCESSORS // num_tiles, in_size // 256))


def few_rows_ahead(num_parts: int, part_size: int) -> int:
    """Elements of each of ``num_parts`` parts of rows, in whole lines."""
    lines = min(FEW_ROWS_AHEAD // (2 * LINE * num_parts), -(-part_size // LINE))
    return max(1, lines) * LINE
