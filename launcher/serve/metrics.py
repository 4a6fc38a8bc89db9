"""What a scraper of Prometheus reads: counters of the front end, gauges of the scheduler."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lockstep.worker.schedule.stats import ReplicaStats, SchedulerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "lockstep_"


def _free_blocks(replica: ReplicaStats) -> int:
    """Blocks that a request could get: those kept only for their prefix included."""
    return replica.num_free_blocks + replica.num_cached_blocks


def _kv_usage(replica: ReplicaStats) -> float:
    return 1 - _free_blocks(replica) / max(1, replica.num_blocks)


# Of each replica: name, help, value.
_GAUGES: tuple[tuple[str, str, Callable[[ReplicaStats], float]], ...] = (
    ("num_requests_running", "Requests in a lane.", lambda r: r.num_running),
    ("num_requests_waiting", "Requests that wait for a lane.", lambda r: r.num_waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", _kv_usage),
    ("kv_blocks_total", "KV blocks that requests may hold.", lambda r: r.num_blocks),
    ("kv_blocks_free", "KV blocks that nobody holds.", _free_blocks),
)


class Metrics:
    """Counts of the front end since the start."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts accepted.")
        self._tokens = self._counter("generation_tokens", "Tokens generated.")
        self._finished = self._counter("request_success", "Requests ended.", "finished_reason")

    def accepted(self, num_prompt_tokens: int) -> None:
        self._prompt_tokens.labels(self._model_name).inc(num_prompt_tokens)

    def advanced(self, num_tokens: int) -> None:
        self._tokens.labels(self._model_name).inc(num_tokens)

    def finished(self, reason: str) -> None:
        self._finished.labels(self._model_name, reason).inc()

    def render(self, stats: SchedulerStats | None) -> bytes:
        """The exposition; without ``stats`` (the scheduler is silent) what is known here."""
        registry = CollectorRegistry()
        if stats is not None:
            registry.register(_Snapshot(stats, self._model_name))
        return generate_latest(self._registry) + generate_latest(registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, ("model_name", *labels), registry=self._registry)


class _Snapshot:
    """Collector of one moment of the scheduler."""

    def __init__(self, stats: SchedulerStats, model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
            for rank, replica in enumerate(self._stats.replicas):
                gauge.add_metric([self._model_name, str(rank)], value(replica))
            yield gauge
        preempted = CounterMetricFamily(_PREFIX + "num_preemptions", "Preemptions.", labels=labels)
        for rank, replica in enumerate(self._stats.replicas):
            preempted.add_metric([self._model_name, str(rank)], replica.num_preemptions)
        yield preempted
