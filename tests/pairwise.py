"""A small set of cases in which every two values of different axes meet."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product

Case = dict[str, str]


def all_cases(axes: Mapping[str, Sequence[str]]) -> list[Case]:
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def pairwise(axes: Mapping[str, Sequence[str]]) -> list[Case]:
    """Greedy and without chance: the case that meets most new pairs, the first of equals."""
    cases = all_cases(axes)
    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs(case: Case) -> set[tuple[tuple[str, str], ...]]:
    return set(combinations(sorted(case.items()), 2))
