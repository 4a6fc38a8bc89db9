"""How products of few rows are cut: what programs hold fits, all is covered, all run at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.worker.kernels.linear_tiles import (
    BUSY_ELEMENTS,
    FEW_ROWS,
    HUGE_WEIGHT,
    MAX_ROWS,
    MAX_SQUARES,
    MULTIPROCESSORS,
    SMALL_ELEMENTS,
    TILE_N,
    Ring,
    few_rows_ring,
    halves_norm,
    lanes_of,
    most_rows,
    normed_row_tiles,
    one_row_tiles,
    starts_next_first,
)

# Of a multiprocessor of Hopper, of which each program takes some for itself.
SHARED_MEMORY = 228 << 10
OWN = 1 << 10
BARRIER = 8

LANES = [8, 16, 32, 64, 128]
# [out_size, in_size] of qkv, o, gate or up, down, and of the logits.
MODELS = {
    "Llama-8B": [(6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096)],
    "Llama-8B TP2": [(3072, 4096), (4096, 2048), (7168, 4096), (4096, 7168), (64128, 4096)],
    "Llama-70B TP8": [(1280, 8192), (8192, 1024), (3584, 8192), (8192, 3584), (16032, 8192)],
    "Qwen3-0.6B": [(4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (151936, 1024)],
    "SmolLM2": [(960, 576), (576, 576), (1536, 576), (576, 1536), (49152, 576)],
}
of_every_model = pytest.mark.parametrize("shape", sum(MODELS.values(), []), ids=str)
sizes = st.integers(1, 20_000).map(lambda size: 8 * size)
lanes_drawn = st.sampled_from(LANES)


def _num_programs(ring: Ring, out_size: int) -> int:
    return -(-out_size // ring.columns) * ring.splits


def _check_ring(out_size: int, in_size: int, lanes: int, gated: bool) -> None:
    ring = few_rows_ring(out_size, in_size, lanes, gated=gated)
    assert 3 * ring.tile_n <= 4 * ring.columns <= 4 * ring.tile_n and ring.columns % 8 == 0
    stage = 2 * ring.tile_k * (ring.tile_n * (1 + gated) + lanes) + BARRIER
    is_alone = ring.tile_n > TILE_N or _num_programs(ring, out_size) <= MULTIPROCESSORS
    sharing = 1 if is_alone else 2
    assert sharing * (ring.num_stages * stage + OWN) <= SHARED_MEMORY
    part = -(-in_size // ring.splits)
    assert ring.num_stages >= 2 or part <= ring.tile_k, "one tile comes while another is used"
    assert (ring.num_stages - 1) * ring.tile_k < part, "no slot stays empty"
    assert ring.splits == 1 or _num_programs(ring, out_size) <= MULTIPROCESSORS


@of_every_model
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("lanes", LANES)
def test_rings_of_every_model_fit(shape: tuple[int, int], lanes: int, gated: bool) -> None:
    _check_ring(*shape, lanes, gated)


@given(sizes, sizes, lanes_drawn, st.booleans())
def test_rings_of_any_size_fit(out_size: int, in_size: int, lanes: int, gated: bool) -> None:
    _check_ring(out_size, in_size, lanes, gated)


@given(st.integers(1, 300_000), sizes, lanes_drawn, st.booleans())
def test_fewer_columns_than_a_tile_leave_all_programs_running_at_once(
    out_size: int, in_size: int, lanes: int, gated: bool
) -> None:
    ring = few_rows_ring(out_size, in_size, lanes, gated=gated)
    if ring.columns < ring.tile_n:
        of_tiles = -(-out_size // ring.tile_n)
        wanted = -(-of_tiles // MULTIPROCESSORS)
        rounds = wanted if ring.tile_n > TILE_N else min(2, wanted)
        assert of_tiles < _num_programs(ring, out_size) <= rounds * MULTIPROCESSORS


@pytest.mark.parametrize(
    "out_size, columns, num_programs", [(14336, 112, 128), (28672, 112, 256), (17000, 128, 133)]
)
def test_many_rows_of_a_large_gated_weight_have_a_multiprocessor_a_program(
    out_size: int, columns: int, num_programs: int
) -> None:
    """Two on one would each read all rows: 72 rows of 14336 outputs took 17 us more of 161."""
    ring = few_rows_ring(out_size, 4096, 128, gated=True)
    assert (ring.columns, ring.num_warps) == (columns, 8)
    assert _num_programs(ring, out_size) == num_programs
    assert few_rows_ring(out_size, 4096, 64, gated=True).num_warps == 4
    assert few_rows_ring(8448, 4096, 128, gated=True).num_warps == 4


@pytest.mark.parametrize(
    "shape, gated, columns, splits",
    [
        ((6144, 4096), False, 48, 1),
        ((14336, 4096), True, 56, 1),
        ((7168, 4096), True, 56, 1),
        ((4096, 14336), False, 64, 2),
        ((1024, 3072), False, 64, 3),
        ((1024, 3072), True, 64, 1),
        ((128256, 4096), False, 64, 1),
    ],
    ids=str,
)
def test_work_is_spread_by_columns_or_by_splits(
    shape: tuple[int, int], gated: bool, columns: int, splits: int
) -> None:
    ring = few_rows_ring(*shape, 8, gated=gated)
    assert (ring.columns, ring.splits) == (columns, splits)


@given(st.integers(1, MAX_ROWS))
def test_lanes_are_the_fewest_that_the_matrix_units_take(num_rows: int) -> None:
    assert lanes_of(num_rows) == min(lanes for lanes in LANES if lanes >= num_rows)


@given(st.integers(1, MAX_ROWS), st.integers(1, 40_000))
def test_sums_of_squares_of_a_half_norm_fit_registers(num_rows: int, size: int) -> None:
    columns = few_rows_ring(size, 4096, lanes_of(num_rows), gated=False).columns
    num_tiles = -(-size // columns)
    padded = next(1 << power for power in range(32) if 1 << power >= num_tiles)
    fits = padded * lanes_of(num_rows) <= MAX_SQUARES
    assert halves_norm(num_rows, size) == (fits and 2 <= num_rows <= FEW_ROWS)


@pytest.mark.parametrize("num_rows", [2, 16, FEW_ROWS])
@pytest.mark.parametrize("size", sorted({model[1][0] for model in MODELS.values()}))
def test_the_norms_of_every_model_are_halved(num_rows: int, size: int) -> None:
    assert halves_norm(num_rows, size)


@pytest.mark.parametrize("num_elements, gated", [(HUGE_WEIGHT - 1, True), (1 << 40, False)])
def test_more_rows_are_left_to_cublas(num_elements: int, gated: bool) -> None:
    assert most_rows(num_elements, gated=gated) == FEW_ROWS


def test_but_with_huge_gated_weights() -> None:
    assert most_rows(HUGE_WEIGHT, gated=True) == MAX_ROWS


@pytest.mark.parametrize(
    "num_elements, lanes, first",
    [
        (SMALL_ELEMENTS - 1, 1, True),
        (SMALL_ELEMENTS, 1, False),
        (1, 8, True),
        (BUSY_ELEMENTS, 8, True),
        (BUSY_ELEMENTS - 1, 16, False),
        (BUSY_ELEMENTS, 16, True),
        (BUSY_ELEMENTS - 1, 128, False),
        (BUSY_ELEMENTS, 128, True),
    ],
)
def test_when_the_next_kernel_starts_first(num_elements: int, lanes: int, first: bool) -> None:
    assert starts_next_first(num_elements, lanes) is first


@given(sizes, st.booleans())
def test_tiles_of_one_row_are_powers_of_two_and_fit_registers(in_size: int, gated: bool) -> None:
    for choose in (one_row_tiles, normed_row_tiles):
        tiles = choose(in_size, gated=gated)
        for size in (tiles.tile_n, tiles.tile_k, tiles.num_warps):
            assert size & (size - 1) == 0
        per_thread = tiles.tile_n * tiles.tile_k * (1 + gated) // (32 * tiles.num_warps)
        assert per_thread <= 128
