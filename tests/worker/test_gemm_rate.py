"""The rate of matrix products of a model's shapes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.worker import gemm_rate
from lockstep.worker.gemm_rate import Product, measure_gemm_rate, rate_of

CPU = torch.device("cpu")


def test_a_slow_product_counts_by_its_operations() -> None:
    small, large = Product(10, 10, 5, 1.0), Product(10, 90, 5, 2.0)
    found = rate_of({"small": small, "large": large})
    assert (small.flops, large.flops) == (1000, 9000)
    assert found.flops_per_s == pytest.approx(10_000 / 3)


def test_products_are_of_the_shapes_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Tensor]()

    def timed(device: torch.device, call: Callable[[], Tensor], num_calls: int) -> float:
        made.append(call())
        return float(len(made))

    monkeypatch.setattr(gemm_rate, "least_seconds", timed)
    found = measure_gemm_rate(CPU, torch.float16, {"qkv": (8, 24), "o": (16, 8)}, 3)
    assert [(tuple(each.shape), each.dtype) for each in made] == [
        ((3, 24), torch.float16),
        ((3, 8), torch.float16),
    ]
    assert found.products == {"qkv": Product(8, 24, 3, 1.0), "o": Product(16, 8, 3, 2.0)}


def test_a_cpu_is_measured_by_the_clock() -> None:
    found = measure_gemm_rate(CPU, torch.float32, {"o": (256, 128)}, 64)
    assert 1e6 < found.flops_per_s < 1e14


@pytest.mark.gpu
def test_a_gpu_multiplies_large_matrices_faster_than_small_ones() -> None:
    device = torch.device("cuda")
    large = measure_gemm_rate(device, torch.bfloat16, {"gate_up": (4096, 28672)}, 2048)
    small = measure_gemm_rate(device, torch.bfloat16, {"o": (512, 512)}, 64)
    print(f"{large.flops_per_s / 1e12:.0f} and {small.flops_per_s / 1e12:.1f} TFLOP/s")  # noqa: T201
    assert large.flops_per_s > 10 * small.flops_per_s
