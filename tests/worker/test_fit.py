"""Fitted sizes against every choice there is."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.worker.graphs.fit import fit_sizes

histograms = st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=9)


def padded_tokens(histogram: dict[int, int], sizes: Sequence[int]) -> int:
    """Tokens computed for nobody when each batch takes the next of ``sizes``."""
    return sum(
        steps * (sizes[bisect_left(sizes, num_tokens)] - num_tokens)
        for num_tokens, steps in histogram.items()
    )


def best_of_all(histogram: dict[int, int], max_sizes: int) -> int:
    """Fewest padded tokens over all sets of sizes, from every size there could be."""
    largest = max(histogram)
    smaller = range(1, largest)
    count = min(max_sizes, largest) - 1
    return min(padded_tokens(histogram, (*rest, largest)) for rest in combinations(smaller, count))


@given(st.dictionaries(st.integers(1, 12), st.integers(1, 5), min_size=1), st.integers(1, 12))
def test_no_set_of_sizes_pads_less(histogram: dict[int, int], max_sizes: int) -> None:
    sizes = fit_sizes(histogram, max_sizes)
    assert len(sizes) <= max_sizes
    assert list(sizes) == sorted(set(sizes))
    assert padded_tokens(histogram, sizes) == best_of_all(histogram, max_sizes)


@given(histograms)
def test_one_more_size_never_pads_more(histogram: dict[int, int]) -> None:
    costs = [
        padded_tokens(histogram, fit_sizes(histogram, count))
        for count in range(1, len(histogram) + 2)
    ]
    assert costs == sorted(costs, reverse=True)
    assert costs[len(histogram) - 1] == 0


def test_a_cut_by_hand() -> None:
    histogram = {1: 100, 2: 1, 9: 5, 10: 50, 30: 1}
    assert fit_sizes(histogram, 3) == (1, 10, 30)
    assert padded_tokens(histogram, (1, 10, 30)) == 8 + 5
    assert fit_sizes(histogram, 99) == (1, 2, 9, 10, 30)


def test_a_thousand_sizes_take_no_time() -> None:
    histogram = {size: 1 + size * 7919 % 97 for size in range(1, 1025)}
    sizes = fit_sizes(histogram, 51)
    assert len(sizes) == 51 and sizes[-1] == 1024
    assert padded_tokens(histogram, sizes) < padded_tokens(histogram, range(20, 1041, 20))


@pytest.mark.parametrize(
    ("histogram", "max_sizes", "message"),
    [
        ({4: 1}, 0, "max_graphs must be at least 1, got 0"),
        ({}, 1, "got {}"),
        ({0: 1}, 1, "at least 1 token, got {0: 1}"),
        ({4: 0}, 1, "got {4: 0}"),
    ],
)
def test_bad_input(histogram: dict[int, int], max_sizes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_sizes(histogram, max_sizes)
