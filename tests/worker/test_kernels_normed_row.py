"""A product with the norm of a sum, one row in one kernel, against norm and product apart."""

from dataclasses import dataclass

import pytest
import torch
from kernel_device import kernel_device, kernel_marks
from torch import Tensor

DEVICE = kernel_device()

from lockstep.parallel.placement import LinearOps, TorchLinear  # noqa: E402
from lockstep.worker.kernels import ops  # noqa: E402
from lockstep.worker.kernels.linear import KernelLinear  # noqa: E402

pytestmark = kernel_marks()
# The interpreter has no arithmetic in bfloat16.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
LIMIT = 2e-2 if DEVICE.type == "cuda" else 2e-3
SHAPES = [(96, 1024), (65, 640), (12, 3000), (30, 64)]


@dataclass
class Norm:
    """``RMSNorm.add`` without a kernel, so that it runs where kernels are interpreted too."""

    weight: Tensor
    eps: float = 1e-5
    calls: int = 0

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        total = x + residual
        return ops.rms_norm_torch(total, self.weight, self.eps), total


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def products(
    ops: LinearOps, x: Tensor, residual: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    return [each(x, residual, norm, weight, bias) for each in (ops.of_norm, ops.gated_of_norm)]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("out_size, in_size", SHAPES)
def test_one_row_is_norm_and_product_in_float32(
    out_size: int, in_size: int, with_bias: bool
) -> None:
    torch.manual_seed(out_size)
    x, residual, norm = _random(1, in_size), _random(1, in_size), Norm(_random(in_size))
    weight = (_random(2 * out_size, in_size).float() * in_size**-0.5).to(DTYPE)
    bias = _random(2 * out_size) if with_bias else None
    got = products(KernelLinear(DEVICE), x, residual, norm, weight, bias)
    assert norm.calls == 0
    total = x + residual
    wide = Norm(norm.weight.float())
    zero = torch.zeros_like(total).float()
    wide_bias = None if bias is None else bias.float()
    wanted = products(TorchLinear(), total.float(), zero, wide, weight.float(), wide_bias)
    for (product, found_total), (expected, _) in zip(got, wanted, strict=True):
        assert found_total.equal(total)
        assert product.dtype is DTYPE
        torch.testing.assert_close(product.float(), expected, rtol=LIMIT, atol=2 * LIMIT)


def test_the_sum_is_rounded_before_it_is_normed() -> None:
    """2048 + 1 is 2048 to a half type, so it leaves nothing beside a 2048 that it is taken from."""
    x, residual = (torch.zeros(1, 64, device=DEVICE).to(DTYPE) for _ in range(2))
    x[0, 0], residual[0, :2] = 1, 2048
    weight = torch.zeros(4, 64, device=DEVICE).to(DTYPE)
    weight[:, 0], weight[:, 1] = 1, -1
    norm = Norm(torch.ones(64, device=DEVICE).to(DTYPE))
    product, total = KernelLinear(DEVICE).of_norm(x, residual, norm, weight)
    assert total[0, 0] == 2048
    assert product.eq(0).all()


@pytest.mark.parametrize("rows", [0, 2, 17])
def test_other_numbers_of_rows_are_normed_apart(rows: int) -> None:
    x, residual, norm = _random(rows, 128), _random(rows, 128), Norm(_random(128))
    weight, bias = _random(96, 128), _random(96)
    got = products(KernelLinear(DEVICE), x, residual, norm, weight, bias)
    assert norm.calls == 2
    wanted = products(TorchLinear(), x, residual, norm, weight, bias)
    for pair, expected in zip(got, wanted, strict=True):
        for each, other in zip(pair, expected, strict=True):
            torch.testing.assert_close(each, other, rtol=2e-2, atol=2e-2)
