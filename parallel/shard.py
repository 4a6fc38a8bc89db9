"""Which part of a weight a rank keeps: arithmetic only, no torch, no communication.

Heads that do not divide. If the ranks are a multiple of the kv heads, each kv head is replicated
and the query heads of its group are padded to equal shares. Otherwise zero groups are added until
the groups divide. Padded heads have zero weights, so they change no sum, and every rank holds the
same shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The run of one dim that a rank keeps: first in its ``local_size``, which ends in zeros."""

    dim: int
    full_size: int
    start: int
    length: int
    local_size: int


def split_range(size: int, tp_size: int, rank: int, *, what: str = "size") -> tuple[int, int]:
    """(start, stop) of a rank's equal share.

    Raises:
        ValueError: ``size`` does not divide; the message names ``what`` and both numbers.
    """
    share, rest = divmod(size, tp_size)
    if rest:
        raise ValueError(f"tensor_parallel_size must divide {what}={size}, got {tp_size}")
    return rank * share, (rank + 1) * share


def padded_vocab(vocab_size: int, tp_size: int) -> int:
    """The vocabulary rounded up to a multiple of the ranks."""
    return -(-vocab_size // tp_size) * tp_size


def even_shard(size: int, tp_size: int, rank: int, *, dim: int = 0, what: str = "size") -> Shard:
    """Equal shares of a dim that must divide."""
    start, stop = split_range(size, tp_size, rank, what=what)
    return Shard(dim, size, start, stop - start, stop - start)


def whole_shard(size: int) -> Shard:
    """What every rank keeps in full, along dim 0."""
    return Shard(0, size, 0, size, size)


def vocab_shard(vocab_size: int, tp_size: int, rank: int) -> Shard:
    """A rank's rows of the padded vocabulary; the rows past the vocabulary are zero."""
    first, last = split_range(padded_vocab(vocab_size, tp_size), tp_size, rank)
    start, stop = min(first, vocab_size), min(last, vocab_size)
    return Shard(0, vocab_size, start, stop - start, last - first)


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Attention heads over ranks. On a rank, query head i attends kv head i // query_share.

    Raises:
        ValueError: the heads are not in equal groups, or there are more ranks than query heads.
    """

    num_heads: int
    num_kv_heads: int
    tp_size: int

    def __post_init__(self) -> None:
        heads, kv_heads, tp_size = self.num_heads, self.num_kv_heads, self.tp_size
        if min(heads, kv_heads, tp_size) < 1:
            counts = f"{heads}, {kv_heads}, {tp_size}"
            raise ValueError(f"num_heads, num_kv_heads, tp_size must be at least 1, got {counts}")
        if heads % kv_heads:
            raise ValueError(f"num_heads {heads} is not a multiple of num_kv_heads {kv_heads}")
        if tp_size > heads:
            raise ValueError(
                f"tensor_parallel_size must be at most num_heads={heads}, got {tp_size}"
            )

    @property
    def group_size(self) -> int:
        """Query heads of one kv head in the checkpoint."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same kv head."""
        replicas, rest = divmod(self.tp_size, self.num_kv_heads)
        return 1 if rest else replicas

    @property
    def num_kv_heads_local(self) -> int:
        return -(-self.num_kv_heads * self.num_replicas // self.tp_size)

    @property
    def query_share(self) -> int:
        """Query heads beside each kv head of a rank, padding included."""
        return -(-self.group_size // self.num_replicas)

    @property
    def num_heads_local(self) -> int:
        return self.num_kv_heads_local * self.query_share

    def kv_heads(self, rank: int) -> tuple[int | None, ...]:
        """Checkpoint kv head of each local kv head; None is a zero head."""
        first = rank * self.num_kv_heads_local
        places = range(first, first + self.num_kv_heads_local)
        heads = (place // self.num_replicas for place in places)
        return tuple(head if head < self.num_kv_heads else None for head in heads)

    def query_heads(self, rank: int) -> tuple[int | None, ...]:
        """Checkpoint query head of each local query head; None is a zero head."""
        first = rank % self.num_replicas * self.query_share
        return tuple(
            head * self.group_size + offset
            if head is not None and offset < self.group_size
            else None
            for head in self.kv_heads(rank)
            for offset in range(first, first + self.query_share)
        )

    def query_shard(self, rank: int, head_dim: int, *, dim: int = 0) -> Shard:
        return _head_shard(self.query_heads(rank), self.num_heads, head_dim, dim)

    def kv_shard(self, rank: int, head_dim: int) -> Shard:
        return _head_shard(self.kv_heads(rank), self.num_kv_heads, head_dim, 0)


def _head_shard(heads: Sequence[int | None], num_heads: int, head_dim: int, dim: int) -> Shard:
    # A rank's heads are neighbours in the checkpoint, and its zero heads come last.
    real = [head for head in heads if head is not None]
    start = real[0] * head_dim if real else 0
    return Shard(dim, num_heads * head_dim, start, len(real) * head_dim, len(heads) * head_dim)
