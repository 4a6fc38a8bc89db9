"""The all-reduces of one group, each for the sizes that the table gives it."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from lockstep.comm.all_reduce.base import AllReduce, FusedAllReduce
from lockstep.comm.all_reduce.table import Choice, fused_bytes, without_fused


class AllReduceTable:
    """The algorithms of one group by size. What does not support a tensor leaves it to the next.

    Args:
        buffer_bytes: fixed buffers that ``algorithms`` work in.
        fused: serves what the choices give to it; without it they must give it nothing.
    """

    def __init__(
        self,
        choices: Iterable[Choice],
        algorithms: Mapping[str, AllReduce],
        buffer_bytes: int = 0,
        fused: FusedAllReduce | None = None,
    ) -> None:
        choices = tuple(choices)
        self.algorithms = dict(algorithms)
        self.choices = choices
        self.text = ",".join(map(str, choices))
        self.buffer_bytes = buffer_bytes + (fused.num_bytes if fused else 0)
        self._sum_bytes = buffer_bytes
        self._entries = [
            (float("inf") if limit is None else limit, algorithms[name])
            for name, limit in without_fused(choices)
        ]
        self._last = self._entries[-1][1]
        self._fused, self._fused_bytes = fused, fused_bytes(choices)

    def rechosen(self, choices: Iterable[Choice], fused: FusedAllReduce | None) -> "AllReduceTable":
        """The same algorithms, and perhaps a fused one, for other sizes."""
        return AllReduceTable(choices, self.algorithms, self._sum_bytes, fused)

    def select(self, x: Tensor) -> AllReduce:
        num_bytes = x.nbytes
        for limit, algorithm in self._entries:
            if num_bytes <= limit and algorithm.supports(x):
                return algorithm
        return self._last

    def select_fused(self, x: Tensor) -> FusedAllReduce | None:
        """For a sum that a norm follows; None if the two are operations of their own."""
        fused = self._fused
        if fused is None or x.nbytes > self._fused_bytes or not fused.supports(x):
            return None
        return fused
