"""Whether numbers are ids of a model's tokens."""

from collections.abc import Sequence


def check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raises ValueError that begins with ``name`` and has the first place that is wrong."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        place = next(i for i, each in enumerate(ids) if not 0 <= each < vocab_size)
        raise ValueError(f"{name}[{place}] must be in [0, {vocab_size}), got {ids[place]}")
