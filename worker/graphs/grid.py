"""The captured sizes: a base grid for mixed batches, a second one for decode (pure, no torch)."""

from collections.abc import Iterable
from typing import Literal

import msgspec

PerformanceMode = Literal["balanced", "interactivity", "throughput"]

LARGEST_CAP = 512
LARGEST_CAP_BLACKWELL = 1024
DECODE_STEP = 32
DENSE_TO = 32


class Grid(msgspec.Struct, frozen=True):
    """Sizes in tokens, ascending.

    ``capture_sizes`` serve PIECEWISE and mixed FULL graphs, ``decode_sizes`` uniform decode ones
    (multiples of ``query_len``). ``warnings`` say where the wish of the user was changed.
    """

    capture_sizes: tuple[int, ...]
    decode_sizes: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    query_len: int = 1
    warnings: tuple[str, ...] = ()

    @property
    def max_capture_size(self) -> int:
        return self.capture_sizes[-1] if self.capture_sizes else 0

    @property
    def largest_decode(self) -> int:
        """Tokens of the largest uniform decode batch that can be scheduled."""
        return _largest_decode(self.max_num_seqs, self.max_num_batched_tokens, self.query_len)

    @property
    def uncovered_decode(self) -> tuple[int, int] | None:
        """First and last size in tokens of the decode batches that no decode size holds."""
        covered = self.decode_sizes[-1] if self.decode_sizes else 0
        if covered >= self.largest_decode:
            return None
        return covered + self.query_len, self.largest_decode


def empty_grid(*, max_num_seqs: int, max_num_batched_tokens: int, query_len: int = 1) -> Grid:
    """The grid of mode NONE."""
    return Grid((), (), max_num_seqs, max_num_batched_tokens, query_len)


def build_grid(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    query_len: int = 1,
    capture_sizes: Iterable[int] | None = None,
    max_capture_size: int | None = None,
    compute_capability: tuple[int, int] = (9, 0),
    performance_mode: PerformanceMode = "balanced",
) -> Grid:
    """Sizes for a batch limit, a token limit and what the user asked for.

    Args:
        query_len: tokens per request of a uniform decode batch (1 + speculative tokens).
        capture_sizes: the user's list; no rule of the standard grid then applies.
        max_capture_size: the user's cap.

    Raises:
        ValueError: a limit or cap below 1, an empty list, one with a size below 1 or with
            no size left below ``max_num_batched_tokens``, or a list at odds with the cap.
    """
    _require_positive("max_num_seqs", max_num_seqs)
    _require_positive("max_num_batched_tokens", max_num_batched_tokens)
    _require_positive("query_len", query_len)
    if max_capture_size is not None:
        _require_positive("max_cudagraph_capture_size", max_capture_size)
    warnings = list[str]()
    top = _largest_decode(max_num_seqs, max_num_batched_tokens, query_len)
    if capture_sizes is not None:
        sizes = _user_sizes(capture_sizes, max_num_batched_tokens, max_capture_size, warnings)
        decode = sizes
    elif max_capture_size is not None:
        cap = min(max_capture_size, max_num_batched_tokens)
        sizes = _standard_sizes(cap, max_num_batched_tokens, (), performance_mode)
        _note_lowered_cap(max_capture_size, sizes[-1], warnings)
        decode = (*sizes, top) if top <= max_capture_size else sizes
    else:
        limit = min(2 * max_num_seqs * query_len, _ceiling(compute_capability))
        cap = min(limit, max_num_batched_tokens)
        extras = _decode_extras(max_num_seqs, query_len, limit)
        sizes = _standard_sizes(cap, max_num_batched_tokens, extras, performance_mode)
        decode = (*sizes, *range(sizes[-1] + DECODE_STEP, top, DECODE_STEP), top)
    rounded = _round_up(decode, query_len, top)
    return Grid(sizes, rounded, max_num_seqs, max_num_batched_tokens, query_len, tuple(warnings))


def _require_positive(field: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{field} must be at least 1, got {value}")


def _largest_decode(max_num_seqs: int, max_num_batched_tokens: int, query_len: int) -> int:
    return query_len * min(max_num_seqs, max_num_batched_tokens // query_len)


def _ceiling(compute_capability: tuple[int, int]) -> int:
    return LARGEST_CAP_BLACKWELL if compute_capability[0] == 10 else LARGEST_CAP


def _ladder(cap: int) -> set[int]:
    return {size for size in (1, 2, 4, *range(8, 249, 8), *range(256, cap + 1, 16)) if size <= cap}


def _decode_extras(max_num_seqs: int, query_len: int, cap: int) -> tuple[int, ...]:
    """Sizes that give decode batches an exact fit."""
    if query_len == 1:
        return (max_num_seqs,) if max_num_seqs <= cap else ()
    counts = _ladder(max_num_seqs) | {max_num_seqs}
    return tuple(count * query_len for count in counts if count * query_len <= cap)


def _standard_sizes(
    cap: int,
    max_num_batched_tokens: int,
    extras: Iterable[int],
    performance_mode: PerformanceMode,
) -> tuple[int, ...]:
    sizes = _ladder(cap)
    if performance_mode == "interactivity":
        sizes |= set(range(1, min(cap, DENSE_TO) + 1))
    if max_num_batched_tokens <= cap:
        sizes.add(max_num_batched_tokens)
    sizes |= {size for size in extras if size <= max_num_batched_tokens}
    return tuple(sorted(sizes))


def _user_sizes(
    capture_sizes: Iterable[int],
    max_num_batched_tokens: int,
    max_capture_size: int | None,
    warnings: list[str],
) -> tuple[int, ...]:
    given = sorted(set(capture_sizes))
    if not given or given[0] < 1:
        raise ValueError(f"cudagraph_capture_sizes must be sizes of at least 1, got {given}")
    kept = tuple(size for size in given if size <= max_num_batched_tokens)
    if not kept:
        raise ValueError(
            f"cudagraph_capture_sizes must hold a size of at most "
            f"max_num_batched_tokens={max_num_batched_tokens}, got {given}"
        )
    if len(kept) < len(given):
        warnings.append(
            f"cudagraph_capture_sizes {given[len(kept) :]} dropped: above "
            f"max_num_batched_tokens={max_num_batched_tokens}"
        )
    if max_capture_size not in (None, kept[-1]):
        raise ValueError(
            f"max_cudagraph_capture_size must equal the largest of cudagraph_capture_sizes, "
            f"{kept[-1]}, got {max_capture_size}"
        )
    return kept


def _note_lowered_cap(max_capture_size: int | None, largest: int, warnings: list[str]) -> None:
    if max_capture_size is not None and max_capture_size != largest:
        warnings.append(
            f"max_cudagraph_capture_size {max_capture_size} lowered to {largest}, "
            f"the largest size of the grid"
        )


def _round_up(sizes: Iterable[int], query_len: int, top: int) -> tuple[int, ...]:
    """Multiples of ``query_len``, those above ``top`` dropped."""
    rounded = {-(-size // query_len) * query_len for size in sizes}
    return tuple(sorted(size for size in rounded if 0 < size <= top))
