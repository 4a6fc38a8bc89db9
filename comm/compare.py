"""Finding the rank that differs."""

from collections import Counter
from collections.abc import Hashable, Sequence


def odd_one_out(values: Sequence[Hashable]) -> tuple[int, int] | None:
    """(first index that differs, first index of the usual value), or None if all are equal."""
    usual = Counter(values).most_common(1)[0][0]
    odd = next((index for index, value in enumerate(values) if value != usual), None)
    return None if odd is None else (odd, values.index(usual))
