"""Counters of a scheduler, as plain data."""

import msgspec


class ReplicaStats(msgspec.Struct, frozen=True):
    """State of one replica; blocks without the padding block."""

    num_waiting: int
    num_running: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_cached_tokens: int
    num_looked_up_tokens: int


class SchedulerStats(msgspec.Struct, frozen=True):
    """Everything since the start; ``steps_by_run_mode`` is keyed by the mode's name.

    ``num_tokens`` were scheduled, ``num_padding_tokens`` were computed beside them.
    """

    replicas: list[ReplicaStats]
    steps_by_run_mode: dict[str, int]
    num_tokens: int
    num_padding_tokens: int
    num_finished: dict[str, int]
    num_dropped_results: int
    num_unknown_aborts: int
