"""From the times of all-reduces at some sizes to the table that uses the fastest. No torch."""

from collections.abc import Sequence
from itertools import groupby, takewhile

from lockstep.comm.all_reduce.table import FUSED, Choice
from lockstep.comm.messages import SumTimes

# Less is noise, and a table of many entries would come of it.
_WORTH_A_CHANGE = 0.97


def slowest_of(ranks: Sequence[Sequence[SumTimes]]) -> list[SumTimes]:
    """What the group took: at each size the greatest time over its ranks.

    Args:
        ranks: of each the same sizes and algorithms, in the same order.
    """
    return [
        SumTimes(
            rows[0].num_bytes,
            {
                name: max(row.microseconds[name] for row in rows)
                for name in rows[0].microseconds
                if all(name in row.microseconds for row in rows)
            },
        )
        for rows in zip(*ranks, strict=True)
    ]


def fastest(times: Sequence[SumTimes], library: str) -> tuple[Choice, ...]:
    """The table of the fastest by size.

    ``times`` are of rising sizes. Up to the largest of them the fastest serves; above, and where
    nothing was measured, ``library``.
    """
    limits = list[Choice]()
    for name, rows in groupby(zip(_winners(times), times, strict=True), lambda pair: pair[0]):
        limits.append(Choice(name, [row.num_bytes for _, row in rows][-1]))
    if limits and limits[-1].algorithm == library:
        limits.pop()
    fused = [row.num_bytes for row in takewhile(_fused_wins, times)]
    first = [Choice(FUSED, fused[-1])] if fused else []
    return (*first, *limits, Choice(library, None))


def _winners(times: Sequence[SumTimes]) -> list[str]:
    """Of sums that are operations of their own; who won at the size before stays if it is close."""
    winners = list[str]()
    for row in times:
        sums = {name: took for name, took in row.microseconds.items() if name != FUSED}
        best = min(sums, key=lambda name: sums[name])
        last = winners[-1] if winners else best
        close = last in sums and sums[best] > _WORTH_A_CHANGE * sums[last]
        winners.append(last if close else best)
    return winners


def _fused_wins(row: SumTimes) -> bool:
    others = (took for name, took in row.microseconds.items() if name != FUSED)
    return FUSED in row.microseconds and row.microseconds[FUSED] <= min(others)
