"""One operation of a step on the device. No torch."""

from collections.abc import Sequence

import msgspec
from msgspec import structs


class Operation(msgspec.Struct, frozen=True):
    """A kernel, copy or fill on a GPU; on a CPU an operation of torch that does work.

    ``start_us`` counts from the step's first one. Operations that were submitted together, as one
    graph, have one ``submission``.
    """

    name: str
    start_us: float
    duration_us: float
    submission: int

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def own_times(operations: Sequence[Operation]) -> list[float]:
    """Microseconds for which each operation keeps the device busy after those before it.

    An operation may start early and wait for the one ahead of it (programmatic dependent launch):
    that time counts once, so the sum is the time for which the device is busy.

    Args:
        operations: by rising ``start_us``.
    """
    own, busy_until = list[float](), 0.0
    for each in operations:
        own.append(max(0.0, each.end_us - max(each.start_us, busy_until)))
        busy_until = max(busy_until, each.end_us)
    return own


def num_submissions(operations: Sequence[Operation]) -> int:
    """How often the host had to hand something to the device."""
    return len({each.submission for each in operations})


def last_step(operations: Sequence[Operation], num_steps: int) -> list[Operation] | None:
    """The last of ``num_steps`` equal steps in a row, from its own start; None if they differ."""
    size = len(operations) // num_steps
    names = [each.name for each in operations]
    if names != names[-size:] * num_steps:
        return None
    last = operations[-size:]
    began = last[0].start_us
    return [structs.replace(each, start_us=each.start_us - began) for each in last]
