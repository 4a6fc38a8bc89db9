"""The rings between one scheduler and its ranks: how many, who reads which, how large."""

import msgspec

from lockstep.comm.ring import Ring, RingAddress, RingReader, RingWriter
from lockstep.parallel.mesh import lockstep_group_ranks
from lockstep.worker.config import WorkerConfig

_SLACK_BYTES = 1 << 20
_LANE_BYTES = 8 << 10
_RESULT_LANE_BYTES = 512


# Producer: the process of the scheduler. Consumer: one rank.
class RankRings(msgspec.Struct, frozen=True):
    """Reader ``reader_index`` of the plan ring of its lockstep group, and its own result ring."""

    plans: RingAddress
    reader_index: int
    results: RingAddress


class SchedulerRings:
    """Owner of all rings of an engine: one of plans a lockstep group, one of results a rank."""

    def __init__(self, config: WorkerConfig) -> None:
        self._groups = lockstep_group_ranks(config.parallel)
        plan_bytes, result_bytes = ring_bytes(config)
        self._plans = [
            Ring.create(num_readers=len(ranks), capacity_bytes=plan_bytes) for ranks in self._groups
        ]
        self._results = [
            Ring.create(num_readers=1, capacity_bytes=result_bytes)
            for _ in range(config.parallel.world_size)
        ]
        self.plan_writers = [RingWriter(ring) for ring in self._plans]
        self.result_readers = [RingReader(ring, 0) for ring in self._results]

    def addresses(self) -> list[RankRings]:
        """What each rank attaches to, in order of global rank."""
        return [
            RankRings(ring.address, index, self._results[rank].address)
            for ring, ranks in zip(self._plans, self._groups, strict=True)
            for index, rank in enumerate(ranks)
        ]

    def close(self) -> None:
        for writer in self.plan_writers:
            writer.close()
        for reader in self.result_readers:
            reader.close()
        for ring in (*self._plans, *self._results):
            ring.close()


def ring_bytes(config: WorkerConfig) -> tuple[int, int]:
    """(plan, result) ring sizes: each holds a few of the largest messages that can be.

    A plan's largest parts are the prompt ids of one step and, for lanes that join, the block
    tables and sampling parameters. The memory is taken page by page as it is first written.
    """
    schedule, replicas = config.schedule, config.parallel.lockstep_dp_size
    table_bytes = 4 * -(-schedule.max_model_len // config.cache.block_size)
    joins = schedule.max_num_seqs * (table_bytes + _LANE_BYTES)
    plan = replicas * (4 * schedule.max_num_batched_tokens + joins)
    result = schedule.max_num_seqs * _RESULT_LANE_BYTES
    return 4 * plan + _SLACK_BYTES, 16 * result + _SLACK_BYTES
