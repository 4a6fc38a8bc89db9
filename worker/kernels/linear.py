"""Products with a rank's weights on CUDA: our kernels for few rows, cuBLAS for many.

For few rows the time of y = x W^T is that of reading W once.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.parallel.placement import NormedSum, TorchLinear
from lockstep.worker.kernels.activation import silu_and_mul
from lockstep.worker.kernels.embed import embed
from lockstep.worker.kernels.few_rows import FewRows
from lockstep.worker.kernels.linear_tiles import (
    MAX_ROWS,
    WIDE_ROWS,
    halves_norm,
    most_rows,
)
from lockstep.worker.kernels.normed_row import normed_row
from lockstep.worker.kernels.one_row import one_row


class FewRowsLinear:
    """``LinearOps`` of 1 to ``MAX_ROWS`` rows by our kernels; calls must be on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._few_rows = FewRows(device)

    def serves(self, x: Tensor, weight: Tensor) -> bool:
        """x [rows, in_size] and weight [out_size, in_size], both of one half type."""
        return (
            not torch.compiler.is_compiling()
            and has_units(x.device)
            and 0 < x.shape[0] <= MAX_ROWS
            and x.dtype == weight.dtype
            and x.element_size() == 2
            and weight.is_contiguous()
            and _has_aligned_rows(x)
            and _has_aligned_rows(weight)
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, [rows, out_size], accumulated in float32 and rounded once."""
        return self._run(x, weight, bias, gated=False)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """silu(gate) * up of x @ weight.T + bias, gate first, without rounding in between."""
        return self._run(x, weight, bias, gated=True)

    def in_float32(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """x @ weight.T into contiguous ``out`` [rows, out_size] of float32, not rounded."""
        return self._run(x, weight, None, gated=False, out=out)

    def serves_norm(self, summed: NormedSum, weight: Tensor) -> bool:
        """True if the norm can be half in each of the products around it.

        Only of bfloat16: the other half type has no room for numbers that are not yet normed.
        """
        residual = summed.residual
        return (
            residual.dtype is torch.bfloat16
            and residual.is_contiguous()
            and self.serves(summed.x, summed.weight)
            and self.serves(residual, weight)
            and halves_norm(*residual.shape)
        )

    def of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        """What ``KernelLinear`` has by that name, gated or not, if ``serves_norm``."""
        return self._few_rows.of_norm(summed, weight, bias, gated=gated)

    def _run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gated: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        run = one_row if x.shape[0] == 1 else self._few_rows
        return run(x, weight, bias, gated=gated, out=out)


@functools.cache
def has_units(device: torch.device) -> bool:
    """False on GPUs that are not Hopper: the kernel of several rows is for its matrix units."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def _has_aligned_rows(x: Tensor) -> bool:
    """Tensor descriptors take rows of whole 16 bytes that begin at multiples of them."""
    return (
        x.stride(1) == 1 and x.shape[1] % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    )


class KernelLinear:
    """``LinearOps`` on CUDA: whatever is faster for so many rows."""

    def __init__(self, device: torch.device) -> None:
        self._few_rows = FewRowsLinear(device)
        self._torch = TorchLinear()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._are_few(x, weight, gated=False):
            return self._few_rows(x, weight, bias)
        return F.linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._are_few(x, weight, gated=True):
            return self._few_rows.gated(x, weight, bias)
        if torch.compiler.is_compiling():  # makes a kernel of its own
            return self._torch.gated(x, weight, bias)
        return silu_and_mul(F.linear(x, weight, bias))

    def in_float32(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        # The rows are looked at last, as in ``_are_few``.
        if not self._few_rows.serves(x, weight) or x.shape[0] > WIDE_ROWS:
            return self._torch.in_float32(x, weight, out)
        if out is None:
            out = x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)
        return self._few_rows.in_float32(x, weight, out)

    def look_up(self, row_ids: Tensor, weight: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._torch.look_up(row_ids, weight)
        return embed(row_ids, weight)

    def of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(product with ``summed``, the sum before its norm)."""
        return self._of_norm(summed, weight, bias, gated=False)

    def gated_of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(``gated`` of ``summed``, the sum before its norm)."""
        return self._of_norm(summed, weight, bias, gated=True)

    def _of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        if self._few_rows.serves_norm(summed, weight):
            return self._few_rows.of_norm(summed, weight, bias, gated=gated)
        x, residual, norm = self(summed.x, summed.weight), summed.residual, summed.norm
        if self._is_one_row(x, weight):
            return normed_row(x, residual, norm, weight, bias, gated=gated)
        normed, total = norm.add(x, residual)
        product = self.gated if gated else self
        return product(normed, weight, bias), total

    def _are_few(self, x: Tensor, weight: Tensor, *, gated: bool) -> bool:
        # The rows are looked at last: torch.compile would compile for what it sees compared.
        serves = self._few_rows.serves(x, weight)
        return serves and x.shape[0] <= most_rows(weight.numel(), gated=gated)

    def _is_one_row(self, x: Tensor, weight: Tensor) -> bool:
        return self._few_rows.serves(x, weight) and x.shape[0] == 1
