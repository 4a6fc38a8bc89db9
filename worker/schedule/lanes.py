"""Lane arithmetic: who moves where when requests leave and join, so that lanes stay compact."""

from typing import NamedTuple


class Arrangement(NamedTuple):
    """``moves`` are (src, dst) pairs of lanes that stay; ``joins`` the lanes of new requests."""

    num_lanes: int
    moves: list[tuple[int, int]]
    joins: list[int]


def arrange(num_lanes: int, leaves: list[int], num_joins: int) -> Arrangement:
    """Fill the lanes that become free: from the end where lanes get fewer, else with joins.

    A move never reads a lane that another move wrote.
    """
    leaving = set(leaves)
    final = num_lanes - len(leaving) + num_joins
    holes = [lane for lane in sorted(leaving) if lane < final]
    stranded = [lane for lane in range(final, num_lanes) if lane not in leaving]
    moves = list(zip(stranded, holes, strict=False))
    joins = [*holes[len(stranded) :], *range(num_lanes, final)]
    return Arrangement(final, moves, joins)
