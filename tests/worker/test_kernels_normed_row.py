"""A product with the norm of a sum, one row in one kernel, against norm and product apart."""

import pytest
import torch
from kernel_device import kernel_device, kernel_marks
from normed_cases import Norm, in_float32, normed_sum, products
from torch import Tensor

DEVICE = kernel_device()

from lockstep.parallel.placement import TorchLinear  # noqa: E402
from lockstep.worker.kernels.linear import KernelLinear  # noqa: E402
from lockstep.worker.kernels.normed_row import normed_row  # noqa: E402

pytestmark = kernel_marks()
# The interpreter has no arithmetic in bfloat16.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
LIMIT = 2e-2 if DEVICE.type == "cuda" else 2e-3
# The last is longer than one tile.
SHAPES = [(96, 1024), (65, 640), (12, 3000), (30, 64), (6, 9000)]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("out_size, size", SHAPES)
def test_one_row_is_norm_and_product_in_float32(
    out_size: int, size: int, with_bias: bool, gated: bool
) -> None:
    torch.manual_seed(out_size)
    x, residual, norm = _random(1, size), _random(1, size), Norm(_random(size))
    weight = _random(2 * out_size, size) * size**-0.5
    bias = _random(2 * out_size) if with_bias else None
    product, total = normed_row(x, residual, norm, weight, bias, gated=gated)
    assert total.equal(x + residual)
    assert product.dtype is DTYPE
    expected = in_float32(total, norm, weight, bias)[gated]
    torch.testing.assert_close(product.float(), expected, rtol=LIMIT, atol=2 * LIMIT)


def test_the_sum_is_rounded_before_it_is_normed() -> None:
    """2048 + 1 is 2048 to a half type, so it leaves nothing beside a 2048 that it is taken from."""
    x, residual = (torch.zeros(1, 64, device=DEVICE).to(DTYPE) for _ in range(2))
    x[0, 0], residual[0, :2] = 1, 2048
    weight = torch.zeros(4, 64, device=DEVICE).to(DTYPE)
    weight[:, 0], weight[:, 1] = 1, -1
    norm = Norm(torch.ones(64, device=DEVICE).to(DTYPE))
    product, total = normed_row(x, residual, norm, weight, None, gated=False)
    assert total[0, 0] == 2048
    assert product.eq(0).all()


def test_one_row_is_normed_inside_its_product() -> None:
    _check_rows(1, norm_calls=0)


@pytest.mark.parametrize("rows", [0, 65])
def test_other_numbers_of_rows_are_normed_apart(rows: int) -> None:
    _check_rows(rows, norm_calls=2)


def _check_rows(rows: int, *, norm_calls: int) -> None:
    summed, bias = normed_sum(_random, rows, 32, 128), _random(96)
    weight = _random(96, 128) * 128**-0.5
    got = products(KernelLinear(DEVICE), summed, weight, bias)
    assert summed.norm.calls == norm_calls
    wanted = products(TorchLinear(), summed, weight, bias)
    for pair, expected in zip(got, wanted, strict=True):
        for each, other in zip(pair, expected, strict=True):
            torch.testing.assert_close(each, other, rtol=LIMIT, atol=2 * LIMIT)
