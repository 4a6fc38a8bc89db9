"""Which all-reduce for which size: a table that is data, so it can be fixed, hashed and compared.

In text a table reads ``one_shot:65536,two_shot:4194304,nccl``: one-shot up to 64 KiB, two-shot up
to 4 MiB, NCCL above.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from lockstep.comm.all_reduce.base import AllReduce


class Choice(NamedTuple):
    """``algorithm`` serves tensors of at most ``max_bytes``; None is without limit."""

    algorithm: str
    max_bytes: int | None


def parse_table(text: str) -> tuple[Choice, ...]:
    """Read a table. Raises ValueError unless limits rise and the last entry has none."""
    choices = tuple(_parse_choice(text, entry) for entry in text.split(","))
    limits = [choice.max_bytes for choice in choices[:-1]]
    known = [limit for limit in limits if limit is not None]
    if len(known) < len(limits) or known != sorted(set(known)) or choices[-1].max_bytes is not None:
        raise ValueError(
            f"all_reduce must be NAME or NAME:BYTES,...,NAME with rising BYTES, got {text!r}"
        )
    return choices


def _parse_choice(text: str, entry: str) -> Choice:
    name, colon, limit = entry.strip().partition(":")
    if not name.isidentifier() or (colon and not limit.isdecimal()):
        raise ValueError(f"all_reduce must be NAME or NAME:BYTES, got {entry!r} in {text!r}")
    return Choice(name, int(limit) if colon else None)


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
