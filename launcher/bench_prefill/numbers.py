"""What is measured, as it is written to ``--json``."""

import msgspec

from lockstep.launcher.bench_engine.numbers import BenchRun, DeviceNumbers, Setup, Spread
from lockstep.worker.gemm_rate import GemmRate
from lockstep.worker.models.arithmetic import ChunkFlops


class PrefillRow(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks that a prompt of ``to_len`` tokens has more than one of ``from_len``, on average.

    ``chunk_ms`` is by the clock of the front end, ``tokens_per_s`` over all replicas. ``flops`` and
    ``flops_per_s`` are those of one rank, ``share`` is of the rate of products, and ``linear_ms``
    what the weights' products would take at that rate. ``device`` is None if not asked for.
    """

    from_len: int
    to_len: int
    chunk_ms: Spread
    tokens_per_s: float
    flops: ChunkFlops
    flops_per_s: float
    share: float
    linear_ms: float
    device: DeviceNumbers | None = None


PrefillRun = BenchRun[PrefillRow]


class PrefillReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. ``chunk_size`` is in tokens."""

    setup: Setup
    chunk_size: int
    gemm: GemmRate
    runs: list[PrefillRun]
