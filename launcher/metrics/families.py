"""From counts to families of Prometheus; every sample has the model's name and its engine."""

from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from lockstep.launcher.metrics.requests import UNPLACED
from lockstep.worker.schedule.histogram import Histogram

PREFIX = "lockstep_"

# (engine, values of further labels, value)
Counts = Iterable[tuple[int, tuple[str, ...], float]]


class Families:
    """Makes families whose samples carry ``model_name`` and ``engine`` (the dp_rank)."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def counter(self, name: str, text: str, counts: Counts, *labels: str) -> Metric:
        """``name`` gets ``_total`` appended."""
        family = CounterMetricFamily(PREFIX + name, text, labels=self._names(labels))
        for engine, more, value in counts:
            family.add_metric(self._values(engine, more), value)
        return family

    def gauge(self, name: str, text: str, counts: Counts, *labels: str) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=self._names(labels))
        for engine, more, value in counts:
            family.add_metric(self._values(engine, more), value)
        return family

    def histogram(
        self,
        name: str,
        text: str,
        histograms: Iterable[tuple[int, tuple[str, ...], Histogram]],
        *labels: str,
    ) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=self._names(labels))
        for engine, more, histogram in histograms:
            values = self._values(engine, more)
            family.add_metric(values, cumulative(histogram), histogram.total)
        return family

    def _names(self, more: tuple[str, ...]) -> list[str]:
        return ["model_name", "engine", *more]

    def _values(self, engine: int, more: tuple[str, ...]) -> list[str]:
        return [self._model_name, "" if engine == UNPLACED else str(engine), *more]


def cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bounds and how many observations are not above them."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


def renamed(families: Iterable[Metric], names: Collection[str], prefix: str) -> Iterator[Metric]:
    """Copies of the families that ``names`` has, with another prefix."""
    for family in families:
        name = family.name.removeprefix(PREFIX)
        if name in names:
            copy = Metric(prefix + name, family.documentation, family.type)
            copy.samples = [
                each._replace(name=prefix + each.name.removeprefix(PREFIX))
                for each in family.samples
            ]
            yield copy
