"""One reading of a server's ``/metrics``."""

import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lockstep.launcher.errors import LaunchError

_PREFIX = "lockstep_"
_TIMEOUT_S = 10.0
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True)
class Scrape:
    """``at`` is in seconds since the epoch; ``samples`` are those of one moment."""

    at: float
    samples: tuple[Sample, ...]

    def find(self, name: str, **labels: str) -> list[Sample]:
        """Samples of a name (without our prefix) that carry these labels."""
        full = name if name == _STARTED else _PREFIX + name
        found = (each for each in self.samples if each.name == full)
        return [each for each in found if labels.items() <= each.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        return sum(sample.value for sample in self.find(name, **labels))

    def buckets(self, name: str, **labels: str) -> Counter[float]:
        """Of a histogram: how many observations do not exceed each bound."""
        counts: Counter[float] = Counter()
        for sample in self.find(f"{name}_bucket", **labels):
            counts[float(sample.labels["le"])] += int(sample.value)
        return counts

    def values_of(self, label: str) -> list[str]:
        """All values of a label, in order."""
        return sorted({each.labels[label] for each in self.samples if each.labels.get(label)})


def read(text: str, at: float) -> Scrape:
    """Raises ValueError: this is no exposition."""
    families = text_string_to_metric_families(text)
    return Scrape(at, tuple(sample for family in families for sample in family.samples))


def start_of(scrape: Scrape) -> Scrape:
    """The moment at which the server had counted nothing."""
    return Scrape(scrape.total(_STARTED) or scrape.at, ())


def scrape(url: str) -> Scrape:
    """Ask a server. ``url`` is any address of it that a client uses.

    Raises:
        LaunchError: nobody answers there, or it is no server of ours.
    """
    address = metrics_url(url)
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as response:
            return read(response.read().decode(), time.time())
    except (OSError, ValueError, HTTPException) as error:
        raise LaunchError(f"{address}: {error}") from error


def metrics_url(url: str) -> str:
    """The address of the exposition: without a scheme it is http; paths of clients are cut."""
    base = url if "://" in url else f"http://{url}"
    for tail in ("/", "/metrics", "/v1"):
        base = base.removesuffix(tail)
    return f"{base}/metrics"
