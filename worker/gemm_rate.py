"""How fast a device multiplies matrices of a model's shapes: no chunk can be computed faster."""

from collections.abc import Mapping
from functools import partial

import msgspec
import torch
import torch.nn.functional as F

from lockstep.worker.stopwatch import least_seconds

_CALLS_PER_TRIAL = {"cuda": 20, "cpu": 2}


class Product(msgspec.Struct, frozen=True):
    """[num_rows, in_size] times the transpose of a weight [out_size, in_size], by torch."""

    in_size: int
    out_size: int
    num_rows: int
    seconds: float

    @property
    def flops(self) -> int:
        return 2 * self.num_rows * self.in_size * self.out_size

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


class GemmRate(msgspec.Struct, frozen=True):
    """Of all ``products``, which have the names of their weights, one after the other."""

    flops_per_s: float
    products: dict[str, Product]


def measure_gemm_rate(
    device: torch.device,
    dtype: torch.dtype,
    sizes: Mapping[str, tuple[int, int]],
    num_rows: int,
) -> GemmRate:
    """Multiply random numbers; call it while nothing else uses the device.

    Args:
        sizes: (input, output) features of each weight.
    """
    return rate_of(
        {
            name: Product(*size, num_rows, _seconds(device, dtype, *size, num_rows))
            for name, size in sizes.items()
        }
    )


def rate_of(products: dict[str, Product]) -> GemmRate:
    """Weighted by operations: all of them over all of the time."""
    flops = sum(each.flops for each in products.values())
    return GemmRate(flops / sum(each.seconds for each in products.values()), products)


def _seconds(
    device: torch.device, dtype: torch.dtype, in_size: int, out_size: int, num_rows: int
) -> float:
    x = torch.randn(num_rows, in_size, dtype=dtype, device=device)
    weight = torch.randn(out_size, in_size, dtype=dtype, device=device)
    return least_seconds(device, partial(F.linear, x, weight), _CALLS_PER_TRIAL[device.type])
