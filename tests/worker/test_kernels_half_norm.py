"""When a norm is half in each of the products around it: numbers are in test_gpu_half_norm.py."""

from collections.abc import Callable

import pytest
import torch
from kernel_device import kernel_device, kernel_marks
from normed_cases import normed_sum, products
from torch import Tensor

DEVICE = kernel_device()

from lockstep.parallel.placement import NormedSum  # noqa: E402
from lockstep.worker.kernels.linear import FewRowsLinear, KernelLinear  # noqa: E402

pytestmark = kernel_marks()


def _half(rows: int, size: int = 64, dtype: torch.dtype = torch.bfloat16) -> NormedSum:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    return normed_sum(random, rows, 32, size)


def _strided(summed: NormedSum) -> NormedSum:
    wide = torch.cat([summed.residual, summed.residual], dim=1)
    return summed._replace(residual=wide[:, : summed.residual.shape[1]])


@pytest.mark.parametrize(
    "make, served",
    [
        (lambda: _half(2), True),
        (lambda: _half(64), True),
        (lambda: _half(64, 8192), True),
        (lambda: _half(1), False),
        (lambda: _half(65), False),
        (lambda: _half(64, 8200), False),
        (lambda: _half(17, 8200), True),
        (lambda: _half(4, 68), False),
        (lambda: _half(4, dtype=torch.float16), False),
        (lambda: _half(4, dtype=torch.float32), False),
        (lambda: _strided(_half(4)), False),
    ],
    ids=[
        "two", "most", "wide", "one", "many", "squares", "long", "unaligned",
        "float16", "float32", "strided",
    ],
)  # fmt: skip
def test_what_is_served(
    make: Callable[[], NormedSum], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed, calls = make(), list[bool]()

    def of_norm(self: FewRowsLinear, *args: object, gated: bool) -> tuple[Tensor, Tensor]:
        calls.append(gated)
        return summed.residual, summed.residual

    monkeypatch.setattr(FewRowsLinear, "of_norm", of_norm)
    weight = summed.weight.new_zeros(16, summed.residual.shape[1])
    assert FewRowsLinear(DEVICE).serves_norm(summed, weight) is served
    if served:
        products(KernelLinear(DEVICE), summed, weight, None)
    assert calls == ([False, True] if served else [])
