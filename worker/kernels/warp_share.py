"""How the context of a row is shared out to warps. No torch, no Triton.

Fitted to times on an H200, which docs/performance.md has.
"""

from dataclasses import dataclass

TILE = 32  # tokens that a warp takes at a time
# Chunks of a context: of a tile each while no more than this, then of up to LONG_CHUNK tokens.
SOME_CHUNKS = 64
LONG_CHUNK = 128
MAX_CHUNKS = 128
HEAD_DIMS = 64, 128
MAX_GROUP = 16

_MOST_WARPS = 8


@dataclass(frozen=True, slots=True)
class Share:
    """``num_programs`` a row and kv head, and the tiles of keys that a warp has room for."""

    num_programs: int
    num_warps: int
    key_slots: int


def share_of(num_pairs: int, num_multiprocessors: int) -> Share:
    """The most warps with which all programs run at once; ``num_pairs`` of a row and a kv head.

    The result of a row does not depend on it.
    """
    per_sm = -(-num_pairs // num_multiprocessors)
    num_warps = max(1, _MOST_WARPS >> (per_sm - 1).bit_length())
    spare = max(1, num_multiprocessors // num_pairs)
    # Eight warps have their whole chunks on the way with one, and one has seven programs beside it.
    return Share(1 << spare.bit_length() - 1, num_warps, 2 if num_warps in (2, 4) else 1)


def most_split_rows(max_rows: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Rows up to which several programs may share a row and kv head."""
    return min(max_rows, max(1, num_multiprocessors // (2 * num_kv_heads)))
