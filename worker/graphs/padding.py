"""What padding costs: one batch, and all batches that can come (pure, no torch)."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from lockstep.worker.graphs.dispatch import BatchDescriptor, Dispatcher
from lockstep.worker.graphs.grid import Grid
from lockstep.worker.graphs.mode import RunMode


class Batch(NamedTuple):
    """What a step computes; ``uniform_query_len`` is 0 for a mixed batch."""

    num_tokens: int
    num_reqs: int
    uniform_query_len: int
    num_active_loras: int = 0


class Padded(NamedTuple):
    """A batch, and the graph that serves it (in EAGER the batch's own counts)."""

    batch: Batch
    run_mode: RunMode
    descriptor: BatchDescriptor

    @property
    def wasted_tokens(self) -> int:
        return self.descriptor.num_tokens - self.batch.num_tokens

    @property
    def waste_percent(self) -> float:
        """Share of the computed tokens that is padding."""
        return self.wasted_tokens / self.descriptor.num_tokens * 100


class WasteRange(NamedTuple):
    """Batches of ``first`` to ``last`` tokens; ``percent`` counts each of them once."""

    first: int
    last: int
    percent: float
    worst: Padded
    num_eager: int


def pad(dispatcher: Dispatcher, batch: Batch) -> Padded:
    return Padded(batch, *dispatcher.dispatch(*batch))


def likely_batch(num_tokens: int, grid: Grid) -> Batch:
    """The decode batch of so many tokens if one can be scheduled, else the fullest mixed one."""
    num_reqs, rest = divmod(num_tokens, grid.query_len)
    if not rest and num_reqs <= grid.max_num_seqs:
        return Batch(num_tokens, num_reqs, grid.query_len)
    return Batch(num_tokens, min(num_tokens, grid.max_num_seqs), 0)


def decode_batches(grid: Grid) -> Iterator[Batch]:
    """Every uniform decode batch that can be scheduled, ascending."""
    for num_reqs in range(1, grid.largest_decode // grid.query_len + 1):
        yield Batch(num_reqs * grid.query_len, num_reqs, grid.query_len)


def mixed_batches(grid: Grid) -> Iterator[Batch]:
    """Mixed batches up to the largest captured size, each of as many requests as can be."""
    for num_tokens in range(1, grid.max_capture_size + 1):
        yield Batch(num_tokens, min(num_tokens, grid.max_num_seqs), 0)


def waste(dispatcher: Dispatcher, batches: Iterable[Batch]) -> list[WasteRange]:
    """Waste of ascending batches over ranges that double: 1, 2, 3-4, 5-8, ..."""
    padded = (pad(dispatcher, batch) for batch in batches)
    ranges = groupby(padded, key=lambda each: (each.batch.num_tokens - 1).bit_length())
    return [_range(list(members)) for _, members in ranges]


def _range(members: list[Padded]) -> WasteRange:
    return WasteRange(
        members[0].batch.num_tokens,
        members[-1].batch.num_tokens,
        sum(each.wasted_tokens for each in members)
        / sum(each.descriptor.num_tokens for each in members)
        * 100,
        max(members, key=lambda each: each.waste_percent),
        sum(each.run_mode is RunMode.EAGER for each in members),
    )
