"""Rank arithmetic: global rank <-> (dp, tp) coordinates and the rank lists per axis. No torch."""

from lockstep.parallel.config import ParallelConfig


def coordinates(global_rank: int, config: ParallelConfig) -> tuple[int, int]:
    """(dp_rank, tp_rank) of a global rank; dp-major, tp fastest."""
    if not 0 <= global_rank < config.world_size:
        raise ValueError(f"global_rank must be in [0, {config.world_size}), got {global_rank}")
    return divmod(global_rank, config.tp_size)


def global_rank(dp_rank: int, tp_rank: int, config: ParallelConfig) -> int:
    """Inverse of ``coordinates``."""
    return dp_rank * config.tp_size + tp_rank


def tp_group_ranks(config: ParallelConfig) -> list[tuple[int, ...]]:
    """One tuple of global ranks per replica."""
    return [
        tuple(range(dp * config.tp_size, (dp + 1) * config.tp_size)) for dp in range(config.dp_size)
    ]


def dp_group_ranks(config: ParallelConfig) -> list[tuple[int, ...]]:
    """Per tp_rank, the ranks of one lockstep group that hold the same shard."""
    size = config.lockstep_dp_size
    return [
        tuple(global_rank(first + i, tp, config) for i in range(size))
        for first in range(0, config.dp_size, size)
        for tp in range(config.tp_size)
    ]


def lockstep_group_ranks(config: ParallelConfig) -> list[tuple[int, ...]]:
    """All global ranks of each lockstep group."""
    width = config.lockstep_dp_size * config.tp_size
    return [tuple(range(first, first + width)) for first in range(0, config.world_size, width)]
