"""Captured sizes fitted to the batches that came: an exact dynamic program (pure, no torch)."""

from collections.abc import Callable, Mapping
from itertools import accumulate


def fit_sizes(histogram: Mapping[int, int], max_sizes: int) -> tuple[int, ...]:
    """At most ``max_sizes`` sizes that hold every batch with the fewest padded tokens.

    Some best choice holds only sizes that occurred, with the largest of them: to choose is to
    cut the ascending sizes into runs, each padded to its last size.

    Args:
        histogram: steps by num_tokens.

    Raises:
        ValueError: no batch, a num_tokens or a count below 1, or ``max_sizes`` below 1.
    """
    if max_sizes < 1:
        raise ValueError(f"max_graphs must be at least 1, got {max_sizes}")
    sizes = sorted(histogram)
    if not sizes or sizes[0] < 1 or min(histogram.values()) < 1:
        raise ValueError(f"histogram must count batches of at least 1 token, got {histogram}")
    if len(sizes) <= max_sizes:
        return tuple(sizes)
    cuts = _cut(_padding(sizes, histogram), len(sizes), max_sizes)
    return tuple(sizes[stop - 1] for stop in cuts)


def _padding(sizes: list[int], histogram: Mapping[int, int]) -> Callable[[int, int], int]:
    """Padded tokens of the run ``sizes[first:stop]``."""
    steps = [0, *accumulate(histogram[size] for size in sizes)]
    tokens = [0, *accumulate(histogram[size] * size for size in sizes)]

    def padding(first: int, stop: int) -> int:
        real = tokens[stop] - tokens[first]
        return sizes[stop - 1] * (steps[stop] - steps[first]) - real

    return padding


def _cut(padding: Callable[[int, int], int], num_sizes: int, num_runs: int) -> list[int]:
    """Ends of the runs of the cheapest cut into ``num_runs``."""
    costs = [padding(0, stop) if stop else 0 for stop in range(num_sizes + 1)]
    starts = [[0] * (num_sizes + 1)]
    for runs in range(2, num_runs + 1):
        costs, last = _add_run(padding, costs, starts[-1], runs)
        starts.append(last)
    ends = [num_sizes]
    for last in reversed(starts[1:]):
        ends.append(last[ends[-1]])
    return ends[::-1]


def _add_run(
    padding: Callable[[int, int], int], costs: list[int], starts: list[int], runs: int
) -> tuple[list[int], list[int]]:
    """Costs of ``runs`` runs up to each stop, and where the last run starts, from one run less."""
    found, last = list(costs), list(starts)
    highest = len(costs) - 2
    for stop in range(len(costs) - 1, runs - 1, -1):
        # A last run starts no earlier than with fewer runs, and no later than for a later stop.
        lowest = max(runs - 1, starts[stop])
        found[stop], last[stop] = min(
            (costs[first] + padding(first, stop), first)
            for first in range(lowest, min(highest, stop - 1) + 1)
        )
        highest = last[stop]
    return found, last
