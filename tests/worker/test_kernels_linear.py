"""Linear layers of few rows against float32 products, and what must not change a row's sum."""

import pytest
import torch
import torch.nn.functional as F
from compilations import compilations
from kernel_device import kernel_device, kernel_marks
from torch import Tensor

DEVICE = kernel_device()

from lockstep.parallel.placement import TorchLinear  # noqa: E402
from lockstep.worker.kernels.linear import FewRowsLinear, KernelLinear  # noqa: E402
from lockstep.worker.kernels.linear_tiles import (  # noqa: E402
    FEW_ROWS_AHEAD,
    LINE,
    MULTIPROCESSORS,
    WIDE_ROWS,
    Tiles,
    few_rows_ahead,
    few_rows_tiles,
    lanes_of,
)

pytestmark = kernel_marks()
# The interpreter has no arithmetic in bfloat16.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
SHAPES = [(40, 1024), (250, 96), (65, 2048), (300, 600), (6, 4608)]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def _weight(out_size: int, in_size: int) -> Tensor:
    return (_random(out_size, in_size).float() * in_size**-0.5).to(DTYPE)


def _check(rows: int, out_size: int, in_size: int, *, with_bias: bool) -> None:
    torch.manual_seed(rows + out_size)
    linear = FewRowsLinear(DEVICE)
    x, weight = _random(rows, in_size), _weight(2 * out_size, in_size)
    bias = _random(2 * out_size) if with_bias else None
    assert linear.serves(x, weight)
    exact = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    gate, up = exact.chunk(2, dim=-1)
    limit = 1e-3 if DTYPE is torch.float16 else 1e-2
    for got, expected in (
        (linear(x, weight, bias), exact),
        (linear.gated(x, weight, bias), F.silu(gate) * up),
    ):
        assert got.dtype is DTYPE
        torch.testing.assert_close(got.float(), expected, rtol=limit, atol=2 * limit)
    assert linear._few_rows.arrivals.eq(0).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 16, 33])
def test_matches_float32(rows: int, shape: tuple[int, int], with_bias: bool) -> None:
    _check(rows, *shape, with_bias=with_bias)


def test_splits_of_the_sum_are_added_in_order_and_repeat_bit_for_bit() -> None:
    linear, x, weight = FewRowsLinear(DEVICE), _random(5, 1024), _weight(64, 1024)
    for splits in (1, 2, 3, 4):
        tiles = Tiles(32, 128, splits)
        first = linear(x, weight, tiles=tiles)
        torch.testing.assert_close(
            first.float(), F.linear(x.float(), weight.float()), rtol=1e-2, atol=1e-2
        )
        for _ in range(3):
            assert linear(x, weight, tiles=tiles).equal(first)


def test_more_splits_than_there_is_space_for_are_refused() -> None:
    linear, x, weight = FewRowsLinear(DEVICE), _random(5, 64), _weight(16 * 300, 64)
    with pytest.raises(ValueError, match="splits must leave 300 tiles .* within 256 tiles"):
        linear(x, weight, tiles=Tiles(16, 16, 4))


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    linear, x, weight = FewRowsLinear(DEVICE), _random(32, 600), _weight(100, 600)
    together = linear(x, weight)
    assert linear(x[:17], weight).equal(together[:17])
    assert linear(x[11:31], weight).equal(together[11:31])


@pytest.mark.parametrize(
    "x, weight",
    [
        (_random(129, 64), _random(8, 64)),
        (_random(0, 64), _random(8, 64)),
        (_random(2, 64).float(), _random(8, 64)),
        (_random(2, 64).float(), _random(8, 64).float()),
        (_random(2, 60), _random(8, 60)),
        (_random(2, 65)[:, :64], _random(8, 64)),
        (_random(130)[2:].view(2, 64), _random(8, 64)),
        (_random(64, 2).t(), _random(8, 64)),
        (_random(2, 64), _random(64, 8).t()),
    ],
    ids=[
        "rows",
        "empty",
        "mixed types",
        "float32",
        "unaligned",
        "unaligned rows",
        "unaligned start",
        "x strided",
        "weight strided",
    ],  # fmt: skip
)
def test_leaves_the_rest_to_others(x: Tensor, weight: Tensor) -> None:
    assert not FewRowsLinear(DEVICE).serves(x, weight)


@pytest.mark.parametrize("rows", [0, 1, 16, 33, 129])
def test_any_number_of_rows_is_that_of_torch(rows: int) -> None:
    ours, plain = KernelLinear(DEVICE), TorchLinear()
    x, weight, bias = _random(rows, 128), _weight(96, 128), _random(96)
    for got, expected in (
        (ours(x, weight, bias), plain(x, weight, bias)),
        (ours.gated(x, weight, bias), plain.gated(x, weight, bias)),
    ):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 17, 33])
def test_float32_results_are_not_rounded_to_a_half_type(rows: int, given: bool) -> None:
    x, weight = _random(rows, 640), _weight(90, 640)
    out = torch.full((rows, 90), torch.nan, device=DEVICE) if given else None
    got = KernelLinear(DEVICE).in_float32(x, weight, out)
    assert got.dtype is torch.float32
    assert out is None or got.data_ptr() == out.data_ptr()
    exact = x.double() @ weight.double().t()
    limit = 1e-2 if rows > WIDE_ROWS and DEVICE.type == "cpu" else 1e-5
    torch.testing.assert_close(got.double(), exact, rtol=limit, atol=limit)


def test_products_as_wide_as_a_vocabulary_let_programs_share_a_multiprocessor() -> None:
    for lanes in (16, 32):
        tiles = few_rows_tiles(128256, 4096, lanes, gated=False)
        stage = (tiles.tile_n + lanes) * tiles.tile_k * 2
        assert 2 * tiles.num_stages * stage <= 226 << 10


# [out_size, in_size] of qkv, o, gate and up, down.
MODELS = {
    "Llama-8B": [(6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336)],
    "Llama-8B TP2": [(3072, 4096), (4096, 2048), (7168, 4096), (4096, 7168)],
    "Llama-70B TP8": [(1280, 8192), (8192, 1024), (3584, 8192), (8192, 3584)],
    "Qwen3-0.6B": [(4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072)],
    "SmolLM2": [(960, 576), (576, 576), (1536, 576), (576, 1536)],
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", sum(MODELS.values(), []), ids=str)
def test_tiles_of_every_model_fit(shape: tuple[int, int], gated: bool) -> None:
    out_size, in_size = shape
    for lanes in (16, 32, 64, 128):
        tiles = few_rows_tiles(out_size, in_size, lanes, gated=gated)
        stage = (tiles.tile_n * (1 + gated) + lanes) * tiles.tile_k * 2
        assert tiles.num_stages * stage <= 226 << 10
        num_tiles = -(-out_size // tiles.tile_n)
        assert tiles.splits == 1 or num_tiles * tiles.splits <= MULTIPROCESSORS


@pytest.mark.parametrize("num_parts", [960, 6144, 28672, 1 << 17])
def test_what_is_fetched_ahead_is_bounded_over_all_programs(num_parts: int) -> None:
    ahead = few_rows_ahead(num_parts, 1000)
    assert LINE <= ahead <= 1024 and ahead % LINE == 0
    assert 2 * ahead * num_parts <= max(FEW_ROWS_AHEAD, 2 * LINE * num_parts)


@pytest.mark.parametrize(
    "rows, lanes", [(2, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, 128), (128, 128)]
)
def test_lanes_are_the_next_power_of_two(rows: int, lanes: int) -> None:
    assert lanes_of(rows) == lanes


@pytest.mark.gpu
@pytest.mark.parametrize(
    "out_size, in_size",
    [(4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (6144, 4096), (14336, 4096)],
)
def test_model_shapes(out_size: int, in_size: int) -> None:
    for rows in (1, 8, 32, 64, 128):
        _check(rows, out_size, in_size, with_bias=False)


@pytest.mark.gpu
def test_split_sums_repeat_bit_for_bit_while_many_programs_race() -> None:
    linear, x, weight = FewRowsLinear(DEVICE), _random(16, 3072), _weight(1024, 3072)
    first = linear(x, weight)
    for _ in range(500):
        assert linear(x, weight).equal(first)


@pytest.mark.gpu
def test_numbers_of_rows_share_the_kernel_of_their_lanes() -> None:
    linear, weight = FewRowsLinear(DEVICE), _weight(72, 208)
    with compilations() as at_start:
        for rows in (1, 2, 17, 33, 65):
            linear(_random(rows, 208), weight)
    assert len(at_start) == 5
    with compilations() as later:
        for rows in range(1, 129):
            linear(_random(rows, 208), weight)
    assert later == []
