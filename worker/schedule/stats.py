"""Counters of a scheduler, as plain data."""

from typing import TYPE_CHECKING

import msgspec

from lockstep.comm.messages import GraphCost
from lockstep.worker.schedule.histogram import Histogram
from lockstep.worker.schedule.step_times import StepTimes

if TYPE_CHECKING:
    from lockstep.worker.schedule.replica import Replica


class ReplicaStats(msgspec.Struct, frozen=True):
    """State of one replica; blocks without the padding block.

    ``queue_seconds`` is how long requests waited for their first lane. ``late_graphs`` were
    captured while serving.
    """

    num_waiting: int
    num_running: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_cached_tokens: int
    num_looked_up_tokens: int
    queue_seconds: Histogram
    late_graphs: list[GraphCost] = []


class GraphUse(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a lockstep group that replayed one graph, or ran eagerly for one reason.

    ``num_tokens`` are real, ``num_padding_tokens`` were computed beside them, over all replicas.
    ``uniform_query_len`` is 0 for mixed batches; ``num_tokens_padded`` is None in EAGER. The
    group is that of replica ``dp_rank``, its first.
    """

    run_mode: str
    num_tokens_padded: int | None
    uniform_query_len: int
    num_steps: int
    num_tokens: int
    num_padding_tokens: int
    reason: str = ""
    dp_rank: int = 0


class SchedulerStats(msgspec.Struct, frozen=True):
    """Everything since the start; ``steps_by_run_mode`` is keyed by the mode's name.

    ``num_tokens`` were scheduled, ``num_padding_tokens`` were computed beside them.
    ``batch_sizes`` counts a replica's steps by the real tokens of its batch. ``num_bad_lanes``
    counts requests that ended because their logits were not finite. ``epoch`` is the life number
    of the ranks: how often they were started anew. Who runs the scheduler adds ``step_times`` of
    each lockstep group, and the longest pause of the garbage collector in its process, by the
    clock and in CPU time.
    ``num_late_graphs`` is how many sizes every replica captures while serving.
    """

    replicas: list[ReplicaStats]
    steps_by_run_mode: dict[str, int]
    num_tokens: int
    num_padding_tokens: int
    num_finished: dict[str, int]
    num_dropped_results: int
    num_unknown_aborts: int
    graph_uses: list[GraphUse] = []
    batch_sizes: dict[int, int] = {}
    num_bad_lanes: int = 0
    epoch: int = 0
    step_times: list[StepTimes] = []
    longest_gc_pause_s: tuple[float, float] = (0.0, 0.0)
    num_late_graphs: int = 0


def replica_stats(replica: "Replica") -> ReplicaStats:
    """Of a replica as it is now."""
    return ReplicaStats(
        num_waiting=len(replica.waiting),
        num_running=replica.num_running,
        num_blocks=replica.pool.total,
        num_free_blocks=replica.pool.num_free,
        num_cached_blocks=replica.pool.num_cached,
        num_preemptions=replica.num_preemptions,
        num_recomputed_tokens=replica.num_recomputed_tokens,
        num_cached_tokens=replica.waiting.num_cached_tokens,
        num_looked_up_tokens=replica.waiting.num_looked_up_tokens,
        queue_seconds=replica.waiting.queue_seconds,
        late_graphs=list(replica.late_graphs),
    )
