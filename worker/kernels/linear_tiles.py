"""How a product of few rows is cut into programs, and what they hold at a time. No torch.

Fitted to times on an H200, which docs/performance.md has.
"""

from dataclasses import dataclass

MAX_ROWS = 128
# More rows are left to cuBLAS, but with a gated weight of at least so many elements.
FEW_ROWS = 64
HUGE_WEIGHT = 1 << 25
WIDE_ROWS = 64  # rows up to which our kernels are faster where results are float32

# Sums of squares that a program of 128 threads holds in registers beside its product.
MAX_SQUARES = 8192
WARP_N = 16  # output features of each warp of an instruction of the matrix units
TILE_N = 64  # output features that one instruction takes
# A program of so many rows takes two instructions, since two programs would read all rows twice.
WIDE_LANES = 128

MULTIPROCESSORS = 132
# Shared memory of a program that has a multiprocessor to itself, without and with a gate, and of
# one of two on it. A ring beyond that takes no less time, and is longer in the next kernel's way.
ALONE_BYTES = 160 << 10, 204 << 10
SHARED_BYTES = 113 << 10
# Of many rows of a small weight, which leaves room for two programs of attention.
SMALL_BYTES = 120 << 10
# Programs that are enough to read weights at full speed; the longest sum that is not split for
# more of them, and the shortest part that is worth being added up.
ENOUGH_PROGRAMS = 64
LONG_PART = 4096
SHORT_PART = 1024

# Weights of so many elements keep the device busy from kernel to kernel; those of fewer than so
# many are read before the next kernel can have come.
BUSY_ELEMENTS = 1 << 24
SMALL_ELEMENTS = 1 << 23


@dataclass(frozen=True, slots=True)
class Tiles:
    """What one program of one row takes: ``tile_n`` output by ``tile_k`` input features a time."""

    tile_n: int
    tile_k: int
    num_warps: int = 4


@dataclass(frozen=True, slots=True)
class Ring:
    """What one program of few rows does.

    It gives ``columns`` output features, at most ``tile_n``, of which it always reads that many:
    fewer spread the work over all multiprocessors. Tiles of ``tile_k`` input features lie in
    ``num_stages`` slots.
    """

    columns: int
    tile_k: int
    num_stages: int
    splits: int = 1
    tile_n: int = TILE_N

    @property
    def num_warps(self) -> int:
        return self.tile_n // WARP_N


def most_rows(num_elements: int, *, gated: bool) -> int:
    """Rows up to which our kernels are faster than cuBLAS, for a weight of so many elements."""
    return MAX_ROWS if gated and num_elements >= HUGE_WEIGHT else FEW_ROWS


def lanes_of(num_rows: int) -> int:
    """Rows that the matrix units compute for ``num_rows``: 8, 16, 32, 64 or 128."""
    return max(8, 1 << (num_rows - 1).bit_length())


def halves_norm(num_rows: int, size: int) -> bool:
    """Whether a norm of so many rows of ``size`` is half in each of the products around it."""
    num_tiles = -(-size // _columns(size))
    squares = (1 << (num_tiles - 1).bit_length()) * lanes_of(num_rows)
    return 1 < num_rows <= FEW_ROWS and squares <= MAX_SQUARES


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


def few_rows_ring(out_size: int, in_size: int, lanes: int, *, gated: bool) -> Ring:
    """One program a multiprocessor with much in flight, or two where there are so many.

    Args:
        out_size: output features; of a gated product, half the rows of its weight.
    """
    if gated and lanes == WIDE_LANES and _share(out_size):
        return _wide_ring(out_size, in_size)
    columns, shared = _columns(out_size), _share(out_size)
    num_bytes = SHARED_BYTES if shared else ALONE_BYTES[gated]
    if not gated and lanes >= 32 and out_size * in_size < SMALL_ELEMENTS:
        num_bytes = SMALL_BYTES
    splits = 1 if gated else _splits(-(-out_size // columns), in_size)
    part_size = -(-in_size // splits)
    most = num_bytes // (2 * (TILE_N * (1 + gated) + lanes))  # input features
    tile_k = _tile_k(most, part_size)
    return Ring(columns, tile_k, min(most // tile_k, -(-part_size // tile_k)), splits)


def _wide_ring(out_size: int, in_size: int) -> Ring:
    """Of a gated product of many rows: a program alone on its multiprocessor."""
    tile_n = 2 * TILE_N
    per_sm = -(-out_size // (tile_n * MULTIPROCESSORS))
    most = ALONE_BYTES[True] // (2 * (2 * tile_n + WIDE_LANES))
    num_stages = min(most // 64, -(-in_size // 64))
    return Ring(_even_columns(out_size, per_sm, tile_n), 64, num_stages, tile_n=tile_n)


def _tile_k(most: int, part_size: int) -> int:
    """Large tiles, each waited for once, where a ring of ``most`` holds a whole part of the sum."""
    if 256 < part_size and -(-part_size // 256) * 256 <= most:
        return 256
    return 128 if most >= 3 * 128 else 64


def _share(out_size: int) -> bool:
    """Whether programs are two a multiprocessor."""
    return -(-out_size // TILE_N) > MULTIPROCESSORS


def _columns(out_size: int) -> int:
    return _even_columns(out_size, 1 + _share(out_size), TILE_N)


def _even_columns(out_size: int, per_sm: int, tile_n: int) -> int:
    """So many that all multiprocessors have as much work, if that is near a tile.

    Fewer output features of a program would be read by too many others too.
    """
    even = -(-out_size // (8 * MULTIPROCESSORS * per_sm)) * 8
    return even if 3 * tile_n <= 4 * even <= 4 * tile_n else tile_n


def _splits(num_tiles: int, in_size: int) -> int:
    """Adding up takes time: a sum is split for want of programs, or where its parts are long."""
    wanted = max(-(-ENOUGH_PROGRAMS // num_tiles), -(-in_size // LONG_PART))
    return max(1, min(wanted, MULTIPROCESSORS // num_tiles, in_size // SHORT_PART))


def starts_next_first(num_elements: int, lanes: int) -> bool:
    """Whether a product lets the next kernel start before it waits for the one ahead of it.

    The next one is then there in time; but of many rows its programs take room from this one's.
    """
    if lanes == 1:
        return num_elements < SMALL_ELEMENTS
    return lanes == 8 or num_elements >= BUSY_ELEMENTS
