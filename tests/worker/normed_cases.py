"""Sums to be normed, with a norm that counts its calls and needs no kernel."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lockstep.parallel.placement import LinearOps, NormedSum, TorchLinear
from lockstep.worker.kernels import ops


@dataclass
class Norm:
    """``RMSNorm.add`` in plain torch, so that it runs where kernels are interpreted too."""

    weight: Tensor
    eps: float = 1e-5
    calls: int = 0

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        total = x + residual
        return ops.rms_norm_torch(total, self.weight, self.eps), total


def normed_sum(random: Callable[..., Tensor], rows: int, in_size: int, size: int) -> NormedSum:
    """Of numbers from ``random(*shape)``, the product about as large as the residual."""
    weight = random(size, in_size) * in_size**-0.5
    return NormedSum(random(rows, in_size), weight, random(rows, size), Norm(random(size)))


def products(
    ops: LinearOps, summed: NormedSum, weight: Tensor, bias: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Plain and gated, each with the sum before its norm."""
    return [each(summed, weight, bias) for each in (ops.of_norm, ops.gated_of_norm)]


def in_float32(total: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """The plain and the gated product with the norm of ``total``, not rounded."""
    normed = ops.rms_norm_torch(total.float(), norm.weight.float(), norm.eps)
    wide_bias = None if bias is None else bias.float()
    plain = TorchLinear()
    return [each(normed, weight.float(), wide_bias) for each in (plain, plain.gated)]
