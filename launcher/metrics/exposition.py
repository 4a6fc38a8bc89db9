"""The text that a scraper gets."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric

from lockstep.launcher.metrics.engine import engine_families
from lockstep.launcher.metrics.families import Families, renamed
from lockstep.launcher.metrics.requests import RequestMetrics, RequestTotals
from lockstep.worker.schedule.histogram import Histogram
from lockstep.worker.schedule.stats import SchedulerStats

MetricsCompat = Literal["none", "vllm"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Names that gateways, autoscalers, dashboards and load generators read of vLLM.
_GATEWAY = frozenset(
    (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions",
        "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens",
        "request_success", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "cache_config_info",
    )
)  # fmt: skip
# Of each replica: name, help, field of its totals.
_TIMES = (
    ("time_to_first_token_seconds", "From admission to the first token.", "first_token"),
    ("inter_token_latency_seconds", "Between tokens that came apart.", "inter_token"),
    ("request_time_per_output_token_seconds", "Mean of a request.", "per_output_token"),
    ("request_decode_time_seconds", "From the first token to the last.", "decode"),
    ("e2e_request_latency_seconds", "From admission to the end.", "end_to_end"),
    ("request_prompt_tokens", "Tokens of a prompt.", "prompt_length"),
    ("request_generation_tokens", "Tokens that a request was given.", "output_length"),
)


@dataclass(frozen=True)
class ServerFacts:
    """What else a server tells of itself.

    ``block_size`` is in tokens, pauses are in seconds by the clock and in CPU time.
    """

    model_name: str
    block_size: int
    num_blocks: int
    num_rejected: int
    longest_gc_pause_s: tuple[float, float]


def render(
    facts: ServerFacts,
    requests: RequestMetrics,
    stats: SchedulerStats | None,
    compat: MetricsCompat,
) -> bytes:
    """The exposition; without ``stats`` (the scheduler is silent) what the front end knows.

    Args:
        compat: "none", or "vllm" to tell the gateways' names too.
    """
    families = Families(facts.model_name)
    told = [*_requests(requests, families), *_server(facts, stats, families)]
    if stats is not None:
        told += engine_families(stats, families)
    if compat == "vllm":
        told += list(renamed(told, _GATEWAY, "vllm:"))
    registry = CollectorRegistry()
    registry.register(_Told(told))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Told:
    """A collector of what is known already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _requests(requests: RequestMetrics, families: Families) -> Iterator[Metric]:
    replicas = requests.by_replica().items()
    yield families.counter(
        "request_accepted", "Requests admitted.", [(0, (), requests.num_accepted)]
    )
    yield families.counter(
        "request_success",
        "Requests ended, by why.",
        [
            (rank, (reason,), count)
            for rank, totals in replicas
            for reason, count in sorted(totals.finished.items())
        ],
        "finished_reason",
    )
    yield families.counter(
        "prompt_tokens",
        "Tokens of prompts answered.",
        [(r, (), t.prompt_tokens) for r, t in replicas],
    )
    yield families.counter(
        "generation_tokens", "Tokens generated.", [(r, (), t.tokens) for r, t in replicas]
    )
    for name, text, field in _TIMES:
        observed = [(rank, (), _histogram(totals, field)) for rank, totals in replicas]
        yield families.histogram(name, text, observed)


def _histogram(totals: RequestTotals, field: str) -> Histogram:
    found: Histogram = getattr(totals, field)
    return found


def _server(
    facts: ServerFacts, stats: SchedulerStats | None, families: Families
) -> Iterator[Metric]:
    yield families.counter(
        "admission_rejections",
        "Calls refused since the server was full, or too slow to begin them.",
        [(0, (), facts.num_rejected)],
    )
    scheduler = _pauses("scheduler", stats.longest_gc_pause_s) if stats is not None else []
    yield families.gauge(
        "gc_longest_pause_seconds",
        "Longest pause of a garbage collector.",
        [*_pauses("front_end", facts.longest_gc_pause_s), *scheduler],
        "process",
        "clock",
    )
    yield families.gauge(
        "cache_config_info",
        "Settings of the KV cache, as labels.",
        [(0, (str(facts.block_size), str(facts.num_blocks)), 1)],
        "block_size",
        "num_gpu_blocks",
    )


def _pauses(process: str, pause_s: tuple[float, float]) -> list[tuple[int, tuple[str, ...], float]]:
    return [
        (0, (process, clock), each) for clock, each in zip(("wall", "cpu"), pause_s, strict=True)
    ]
