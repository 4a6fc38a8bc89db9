"""Where the weights of a module live, and how a rank multiplies by them."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.all_reduce.base import AddNorm
from lockstep.comm.collectives import Communicator


class NormedSum(NamedTuple):
    """The norm of x @ weight.T + residual, of which nothing is computed yet.

    x is [rows, in_size], weight [size, in_size], residual [rows, size].
    """

    x: Tensor
    weight: Tensor
    residual: Tensor
    norm: AddNorm


class LinearOps(Protocol):
    """Products with one rank's weights, [out_size, in_size]; x is [rows, in_size]."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, [rows, out_size]."""
        ...

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """silu(gate) * up of that product, whose first half is gate: [rows, out_size / 2]."""
        ...

    def in_float32(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """x @ weight.T, [rows, out_size] float32, not rounded to a half type where that can be.

        Into ``out``, if there is one, which must be contiguous.
        """
        ...

    def look_up(self, row_ids: Tensor, weight: Tensor) -> Tensor:
        """Rows ``row_ids`` [n] of ``weight``, which are all there: [n, in_size]."""
        ...

    def of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(product with ``summed``, the sum before its norm)."""
        ...

    def gated_of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(``gated`` of ``summed``, the sum before its norm)."""
        ...


class TorchLinear:
    """``LinearOps`` in plain torch, on any device."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
        return F.silu(gate) * up

    def in_float32(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        product = F.linear(x, weight).float()
        return product if out is None else out.copy_(product)

    def look_up(self, row_ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(row_ids, weight)

    def of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        normed, total = self._norm(summed)
        return self(normed, weight, bias), total

    def gated_of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        normed, total = self._norm(summed)
        return self.gated(normed, weight, bias), total

    def _norm(self, summed: NormedSum) -> tuple[Tensor, Tensor]:
        return summed.norm.add(self(summed.x, summed.weight), summed.residual)


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks a module is split over, and the device and type of its parameters."""

    tp: Communicator
    device: torch.device
    dtype: torch.dtype
    linear: LinearOps = field(default_factory=TorchLinear)

    def parameter(self, *shape: int) -> nn.Parameter:
        """Zeros: what a checkpoint does not fill is padding."""
        weight = torch.zeros(shape, device=self.device, dtype=self.dtype)
        return nn.Parameter(weight, requires_grad=False)
