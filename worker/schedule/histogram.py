"""Observations counted by size: cheap enough for every token, and plain data to send."""

from bisect import bisect_left

import msgspec


class Histogram(msgspec.Struct):
    """``counts[i]`` observations lie in (bounds[i - 1], bounds[i]]; the last is above all bounds.

    One thread observes; others may read. ``total`` is the sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def empty_histogram(bounds: tuple[float, ...]) -> Histogram:
    """``bounds`` ascend."""
    return Histogram(bounds, [0] * (len(bounds) + 1))
