"""When requests are sent."""

import random
from itertools import accumulate


def arrival_times(number: int, rate: float | None, seed: int) -> list[float]:
    """Seconds after the start, ascending from 0.

    Args:
        rate: requests a second of a Poisson process; None for all at once.
    """
    if rate is None:
        return [0.0] * number
    source = random.Random(seed)
    gaps = (source.expovariate(rate) for _ in range(number - 1))
    return list(accumulate(gaps, initial=0.0))
