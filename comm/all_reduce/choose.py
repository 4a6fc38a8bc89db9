"""The all-reduces of one group, each for the sizes that the table gives it."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from lockstep.comm.all_reduce.base import AllReduce
from lockstep.comm.all_reduce.table import Choice


class AllReduceTable:
    """The algorithms of one group by size. What does not support a tensor leaves it to the next.

    Args:
        buffer_bytes: fixed buffers that they work in.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        algorithms: Mapping[str, AllReduce],
        buffer_bytes: int = 0,
    ) -> None:
        self.algorithms = tuple(algorithms.values())
        self.buffer_bytes = buffer_bytes
        self._entries = [
            (float("inf") if limit is None else limit, algorithms[name]) for name, limit in choices
        ]
        self._last = self._entries[-1][1]
        self.text = ",".join(
            name if limit is None else f"{name}:{limit}" for name, limit in choices
        )

    def select(self, x: Tensor) -> AllReduce:
        num_bytes = x.numel() * x.element_size()
        for limit, algorithm in self._entries:
            if num_bytes <= limit and algorithm.supports(x):
                return algorithm
        return self._last
