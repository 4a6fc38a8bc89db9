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
