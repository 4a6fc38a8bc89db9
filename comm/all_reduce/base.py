"""What an all-reduce is: a sum over the ranks of a group, equal bit for bit on all of them."""

from typing import Protocol

from torch import Tensor


class AllReduce(Protocol):
    """One way to sum. ``buffer`` names the fixed buffer it works in, or is empty."""

    name: str
    buffer: str

    def supports(self, x: Tensor) -> bool:
        """True if ``x`` can be summed this way; equal on all ranks for equal shapes."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Sum contiguous ``x`` over the group. May work in place; the result is what returns."""
        ...


class AddNorm(Protocol):
    """The norm that follows a sum."""

    eps: float

    @property
    def weight(self) -> Tensor:
        """[size]"""
        ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the rounded sum, rounded sum) of x and residual, each [rows, size]."""
        ...


class FusedAllReduce(Protocol):
    """A sum over the ranks and the ``AddNorm`` behind it as one operation."""

    @property
    def name(self) -> str: ...

    @property
    def buffer(self) -> str:
        """The name of the fixed buffer it works in."""
        ...

    @property
    def num_bytes(self) -> int:
        """Device memory of the buffer."""
        ...

    def supports(self, x: Tensor) -> bool:
        """True if it can sum ``x`` [rows, size]; equal on all ranks for equal shapes."""
        ...

    def __call__(self, x: Tensor, residual: Tensor, norm: AddNorm) -> tuple[Tensor, Tensor]:
        """``norm.add`` of the sum of ``x``, which is rounded first, and ``residual``."""
        ...
