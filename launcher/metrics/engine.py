"""Families of what the scheduler and the ranks tell."""

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from lockstep.launcher.metrics.families import Families
from lockstep.worker.schedule.stats import GraphUse, ReplicaStats, SchedulerStats
from lockstep.worker.schedule.step_times import StepTimes

Value = Callable[[ReplicaStats], float]


def _free_blocks(replica: ReplicaStats) -> int:
    """Blocks that a request could get: those kept only for their prefix included."""
    return replica.num_free_blocks + replica.num_cached_blocks


def _kv_usage(replica: ReplicaStats) -> float:
    return 1 - _free_blocks(replica) / max(1, replica.num_blocks)


# Of each replica: name, help, value.
_GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("num_requests_running", "Requests in a lane.", lambda r: r.num_running),
    ("num_requests_waiting", "Requests that wait for a lane.", lambda r: r.num_waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", _kv_usage),
    ("kv_blocks", "KV blocks that requests may hold.", lambda r: r.num_blocks),
    ("kv_blocks_free", "KV blocks that nobody holds.", _free_blocks),
)
_COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("num_preemptions", "Requests sent back to the queue.", lambda r: r.num_preemptions),
    ("recomputed_tokens", "Tokens lost to preemptions.", lambda r: r.num_recomputed_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda r: r.num_looked_up_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the cache.", lambda r: r.num_cached_tokens),
)


def engine_families(stats: SchedulerStats, families: Families) -> Iterator[Metric]:
    """One moment of all replicas, then of all lockstep groups."""
    yield from _replicas(stats.replicas, families)
    yield from _steps(stats.graph_uses, families)
    yield from _times(stats.step_times, families)
    yield families.counter("restarts", "Times the ranks were started anew.", [(0, (), stats.epoch)])
    yield families.counter(
        "bad_logits",
        "Requests ended by logits that are not finite.",
        [(0, (), stats.num_bad_lanes)],
    )


def _replicas(replicas: list[ReplicaStats], families: Families) -> Iterator[Metric]:
    for name, text, value in _GAUGES:
        yield families.gauge(name, text, [(i, (), value(r)) for i, r in enumerate(replicas)])
    for name, text, value in _COUNTERS:
        yield families.counter(name, text, [(i, (), value(r)) for i, r in enumerate(replicas)])
    yield families.histogram(
        "request_queue_time_seconds",
        "From the scheduler's queue to the first lane.",
        [(index, (), replica.queue_seconds) for index, replica in enumerate(replicas)],
    )


def _steps(uses: list[GraphUse], families: Families) -> Iterator[Metric]:
    """By run mode; samples of the same labels must be one."""
    steps: dict[tuple[int, tuple[str, ...]], int] = {}
    tokens: dict[tuple[int, tuple[str, ...]], int] = {}
    for use in uses:
        key = use.dp_rank, (use.run_mode,)
        steps[key] = steps.get(key, 0) + use.num_steps
        for kind, count in (("real", use.num_tokens), ("padding", use.num_padding_tokens)):
            place = use.dp_rank, (use.run_mode, kind)
            tokens[place] = tokens.get(place, 0) + count
    yield families.counter(
        "steps", "Steps of a lockstep group.", [(*key, n) for key, n in steps.items()], "run_mode"
    )
    yield families.counter(
        "step_tokens",
        "Tokens computed in steps: real ones and padding.",
        [(*key, n) for key, n in tokens.items()],
        "run_mode",
        "kind",
    )


def _times(times: list[StepTimes], families: Families) -> Iterator[Metric]:
    yield families.histogram(
        "step_time_seconds",
        "How long each step was the oldest in flight.",
        [(each.dp_rank, (), each.step) for each in times],
    )
    parts = ("plan", "commit", "launch")
    yield families.histogram(
        "host_time_seconds",
        "Host work of a step: the scheduler's to plan and commit, a rank's to launch.",
        [(each.dp_rank, (part,), getattr(each, part)) for each in times for part in parts],
        "part",
    )
