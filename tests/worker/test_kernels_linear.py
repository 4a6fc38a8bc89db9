"""Linear layers of one row against float32 products, and which kernels take how many rows."""

import pytest
import torch
import torch.nn.functional as F
from kernel_device import kernel_device, kernel_marks
from torch import Tensor

DEVICE = kernel_device()

from lockstep.parallel.placement import TorchLinear  # noqa: E402
from lockstep.worker.kernels.few_rows import FewRows  # noqa: E402
from lockstep.worker.kernels.linear import FewRowsLinear, KernelLinear, has_units  # noqa: E402
from lockstep.worker.kernels.linear_tiles import (  # noqa: E402
    MAX_ROWS,
    MULTIPROCESSORS,
    TILE_N,
    WIDE_ROWS,
    Ring,
    lanes_of,
)

pytestmark = kernel_marks()
# The interpreter has no arithmetic in bfloat16.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
SHAPES = [(40, 1024), (250, 96), (65, 2048), (300, 600), (6, 4608)]


def on_gpu(*rows: int) -> list[object]:
    """Few rows go through a kernel that no interpreter runs."""
    return [pytest.param(each, marks=pytest.mark.gpu) for each in rows]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def _weight(out_size: int, in_size: int) -> Tensor:
    return (_random(out_size, in_size).float() * in_size**-0.5).to(DTYPE)


def _check(out_size: int, in_size: int, *, with_bias: bool) -> None:
    torch.manual_seed(out_size)
    linear = FewRowsLinear(DEVICE)
    x, weight = _random(1, in_size), _weight(2 * out_size, in_size)
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


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_row_matches_float32(shape: tuple[int, int], with_bias: bool) -> None:
    _check(*shape, with_bias=with_bias)


def test_more_splits_than_there_is_space_for_are_refused() -> None:
    few_rows, x, weight = FewRows(DEVICE), _random(5, 64), _weight(16 * 300, 64)
    with pytest.raises(ValueError, match="splits must leave 300 tiles .* within 256 tiles"):
        few_rows(x, weight, None, gated=False, ring=Ring(16, 16, 2, 4))


@pytest.mark.parametrize("num_tiles", [1, 33, 66])
def test_there_is_space_for_all_splits_that_run_at_once(num_tiles: int) -> None:
    floats = TILE_N * lanes_of(MAX_ROWS)
    FewRows(DEVICE)._check_space(num_tiles, MULTIPROCESSORS // num_tiles, floats)


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


@pytest.mark.parametrize("rows", [0, 1, *on_gpu(2, 16, 33, 128), 129])
def test_any_number_of_rows_is_that_of_torch(rows: int) -> None:
    ours, plain = KernelLinear(DEVICE), TorchLinear()
    x, weight, bias = _random(rows, 128), _weight(96, 128), _random(96)
    for got, expected in (
        (ours(x, weight, bias), plain(x, weight, bias)),
        (ours.gated(x, weight, bias), plain.gated(x, weight, bias)),
    ):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("major, served", [(8, False), (9, True), (10, False)])
def test_gpus_other_than_hopper_are_left_to_cublas(
    major: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    has_units.cache_clear()
    try:
        assert has_units(torch.device("cuda", 7)) is served
        assert has_units(torch.device("cpu"))
    finally:
        has_units.cache_clear()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rows", [0, 1, *on_gpu(2, 17, 64), 65])
def test_float32_results_are_not_rounded_to_a_half_type(rows: int, given: bool) -> None:
    x, weight = _random(rows, 640), _weight(90, 640)
    out = torch.full((rows, 90), torch.nan, device=DEVICE) if given else None
    got = KernelLinear(DEVICE).in_float32(x, weight, out)
    assert got.dtype is torch.float32
    assert out is None or got.data_ptr() == out.data_ptr()
    exact = x.double() @ weight.double().t()
    limit = 1e-2 if rows > WIDE_ROWS and DEVICE.type == "cpu" else 1e-5
    torch.testing.assert_close(got.double(), exact, rtol=limit, atol=limit)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "out_size, in_size",
    [(4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (6144, 4096), (14336, 4096)],
)
def test_one_row_of_model_shapes(out_size: int, in_size: int) -> None:
    _check(out_size, in_size, with_bias=False)
