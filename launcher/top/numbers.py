"""What happened between two readings, of one engine or of all."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from lockstep.launcher.top.scrape import Scrape


@dataclass(frozen=True)
class Window:
    """From ``before`` to ``now``; ``labels`` name an engine, or are empty for all."""

    before: Scrape
    now: Scrape
    labels: dict[str, str]

    def gauge(self, name: str) -> float:
        return self.now.total(name, **self.labels)

    def mean(self, name: str) -> float:
        """Of a gauge, over engines."""
        found = self.now.find(name, **self.labels)
        return sum(sample.value for sample in found) / max(1, len(found))

    def count(self, name: str, **more: str) -> float:
        """How much a counter has grown. A server that was started anew counts from 0."""
        labels = self.labels | more
        now = self.now.total(name, **labels)
        before = self.before.total(name, **labels)
        return now - before if now >= before else now

    def rate(self, name: str) -> float:
        """Growth of a counter in a second."""
        seconds = self.now.at - self.before.at
        return self.count(name) / seconds if seconds > 0 else 0.0

    def share(self, name: str, **more: str) -> float | None:
        """Which part of a counter's growth had labels ``more``; None if there was none."""
        whole = self.count(name)
        return self.count(name, **more) / whole if whole else None

    def quantile(self, name: str, q: float) -> float | None:
        """Of a histogram's observations, between bounds by a straight line; None without any."""
        now, before = (each.buckets(name, **self.labels) for each in (self.now, self.before))
        if any(now[bound] < before[bound] for bound in now):
            before.clear()
        counts = [(bound, now[bound] - before[bound]) for bound in sorted(now)]
        if not counts or not counts[-1][1]:
            return None
        return _interpolate([(0.0, 0), *counts], q * counts[-1][1])


def engines(before: Scrape, now: Scrape) -> Iterator[tuple[str, Window]]:
    """A window of each engine, then one of all if there are several."""
    names = now.values_of("engine")
    for name in names:
        yield name, Window(before, now, {"engine": name})
    if len(names) != 1:
        yield "all", Window(before, now, {})


def _interpolate(counts: list[tuple[float, int]], rank: float) -> float:
    for (low, below), (high, upto) in pairwise(counts):
        if upto >= rank and upto > below:
            inside = (rank - below) / (upto - below)
            return low if high == float("inf") else low + inside * (high - low)
    return counts[-1][0]
