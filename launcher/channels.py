"""The channels between one scheduler and its ranks: how many, who reads which, how large."""

from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from lockstep.comm.channel import ChannelAddress, ChannelReader, ChannelWriter, FanOut
from lockstep.comm.pipe import PipeHub
from lockstep.comm.ring import Ring, RingReader, RingWriter
from lockstep.parallel.mesh import lockstep_group_ranks
from lockstep.worker.config import WorkerConfig

_SLACK_BYTES = 1 << 20
_LANE_BYTES = 8 << 10
_RESULT_LANE_BYTES = 512


# Producer: the launcher, which has placed the ranks. Consumer: the process of the scheduler.
class Seating(msgspec.Struct, frozen=True):
    """Global ranks on other hosts than the scheduler, and the address they reach it at."""

    host: str = "127.0.0.1"
    far: tuple[int, ...] = ()


# Producer: the process of the scheduler. Consumer: one rank.
class RankChannels(msgspec.Struct, frozen=True):
    """Where a rank reads plans, as which reader of a ring, and where it writes its results."""

    plans: ChannelAddress
    reader_index: int
    results: ChannelAddress


class SchedulerChannels:
    """Owner of all channels of an engine: one of plans a lockstep group, one of results a rank.

    Ranks of the scheduler's host share a ring of plans; each rank elsewhere has a pipe.
    """

    def __init__(self, config: WorkerConfig, seating: Seating) -> None:
        self._closing = ExitStack()
        self._far = frozenset(seating.far)
        self._plan_bytes, self._result_bytes = ring_bytes(config)
        self._hub = self._closing.enter_context(PipeHub(seating.host)) if seating.far else None
        self._plans: dict[int, tuple[ChannelAddress, int]] = {}
        self._results: dict[int, ChannelAddress] = {}
        self.plan_writers = [
            self._plan_writer(ranks) for ranks in lockstep_group_ranks(config.parallel)
        ]
        self.result_readers = [
            self._result_reader(rank) for rank in range(config.parallel.world_size)
        ]

    def addresses(self) -> list[RankChannels]:
        """What each rank attaches to, in order of global rank."""
        return [
            RankChannels(*self._plans[rank], self._results[rank]) for rank in sorted(self._plans)
        ]

    def close(self) -> None:
        self._closing.close()

    def _plan_writer(self, ranks: Sequence[int]) -> ChannelWriter:
        near = [rank for rank in ranks if rank not in self._far]
        writers: list[ChannelWriter] = [self._plan_ring(near)] if near else []
        writers += [self._plan_pipe(rank) for rank in ranks if rank in self._far]
        return writers[0] if len(writers) == 1 else FanOut(writers)

    def _plan_ring(self, ranks: Sequence[int]) -> ChannelWriter:
        ring = self._ring(len(ranks), self._plan_bytes)
        self._plans |= {rank: (ring.address, index) for index, rank in enumerate(ranks)}
        writer = RingWriter(ring)
        self._closing.callback(writer.close)
        return writer

    def _plan_pipe(self, rank: int) -> ChannelWriter:
        assert self._hub is not None
        writer = self._hub.writer()
        self._closing.callback(writer.close)
        self._plans[rank] = (writer.address, 0)
        return writer

    def _result_reader(self, rank: int) -> ChannelReader:
        reader: ChannelReader
        if self._hub is not None and rank in self._far:
            reader = pipe = self._hub.reader()
            self._results[rank] = pipe.address
        else:
            ring = self._ring(1, self._result_bytes)
            reader = RingReader(ring, 0)
            self._results[rank] = ring.address
        self._closing.callback(reader.close)
        return reader

    def _ring(self, num_readers: int, num_bytes: int) -> Ring:
        ring = Ring.create(num_readers=num_readers, capacity_bytes=num_bytes)
        return self._closing.enter_context(ring)


def ring_bytes(config: WorkerConfig) -> tuple[int, int]:
    """(plan, result) ring sizes: each holds a few of the largest messages that can be.

    A plan's largest parts are the prompt ids of one step, for lanes that join the block tables
    and sampling parameters, and for lanes with a grammar the masks. The memory is taken page by
    page as it is first written.
    """
    schedule, replicas = config.schedule, config.parallel.lockstep_dp_size
    table_bytes = 4 * -(-schedule.max_model_len // config.cache.block_size)
    mask_bytes = -(-config.model.vocab_size // 8)
    lanes = schedule.max_num_seqs * (table_bytes + _LANE_BYTES + mask_bytes)
    plan = replicas * (4 * schedule.max_num_batched_tokens + lanes)
    result = schedule.max_num_seqs * _RESULT_LANE_BYTES
    return 4 * plan + _SLACK_BYTES, 16 * result + _SLACK_BYTES
