"""Kernels that start before the ones ahead of them end give the bits of those that wait."""

from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from few_rows_cases import DEVICE, between_nan, randn, weight_of
from kernel_device import kernel_device
from normed_cases import Norm
from torch import Tensor

kernel_device()

from lockstep.parallel.placement import NormedSum  # noqa: E402
from lockstep.worker.kernels import chain, ops  # noqa: E402
from lockstep.worker.kernels.linear import FewRowsLinear  # noqa: E402

pytestmark = pytest.mark.gpu

# Products of gate and up are large enough to let the next kernel start first, of any rows. Those of
# o and of down are split.
HIDDEN, INNER, NUM_LAYERS = 2048, 4096, 6
NormProduct = Callable[..., tuple[Tensor, Tensor]]


class Layer(NamedTuple):
    o: Tensor
    gate_up: Tensor
    down: Tensor
    qkv: Tensor
    norm: Norm


def _layer() -> Layer:
    sizes = [(HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER), (2 * HIDDEN, HIDDEN)]
    weights = [between_nan(weight_of(*size)) for size in sizes]
    return Layer(*weights, norm=Norm(between_nan(randn(HIDDEN))))


def _halved(
    linear: FewRowsLinear, summed: NormedSum, weight: Tensor, *, gated: bool
) -> tuple[Tensor, Tensor]:
    assert linear.serves_norm(summed, weight)
    return linear.of_norm(summed, weight, None, gated=gated)


def _apart(
    linear: FewRowsLinear, summed: NormedSum, weight: Tensor, *, gated: bool
) -> tuple[Tensor, Tensor]:
    x, norm = linear(summed.x, summed.weight), summed.norm
    normed, total = ops.add_rms_norm(x, summed.residual, norm.weight, norm.eps)
    return (linear.gated if gated else linear)(normed, weight), total


def _run(product: NormProduct, linear: FewRowsLinear, layers: list[Layer], first: Tensor) -> Tensor:
    residual, qkv = first, torch.cat([first, first], dim=1)
    for layer in layers:
        summed = NormedSum(qkv[:, :HIDDEN], layer.o, residual, layer.norm)
        x, residual = product(linear, summed, layer.gate_up, gated=True)
        summed = NormedSum(x, layer.down, residual, layer.norm)
        qkv, residual = product(linear, summed, layer.qkv, gated=False)
    return qkv


@pytest.mark.parametrize(
    "rows, product",
    [(2, _halved), (16, _halved), (64, _halved), (2, _apart), (16, _apart), (128, _apart)],
)
def test_replays_are_those_of_kernels_that_wait(rows: int, product: NormProduct) -> None:
    torch.manual_seed(rows)
    linear, layers = FewRowsLinear(DEVICE), [_layer() for _ in range(NUM_LAYERS)]
    first = between_nan(randn(rows, HIDDEN))
    with patch.object(chain, "has_dependent_launch", lambda: False):
        expected = _run(product, linear, layers, first)
    assert expected.isfinite().all()
    assert chain.chained()["launch_pdl"], "else this compares nothing"
    _run(product, linear, layers, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = _run(product, linear, layers, first)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(200):
        got.fill_(torch.nan)
        graph.replay()
        wrong += (got != expected).sum()
    assert wrong.item() == 0
