"""How contexts are shared out to warps: all programs run at once, and no batch needs more room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.worker.kernels.warp_share import (
    MAX_CHUNKS,
    SOME_CHUNKS,
    Share,
    most_split_rows,
    share_of,
)

SMS = 132
MOST_WARPS = 8
ROWS = st.integers(1, 2048)
KV_HEADS = st.integers(1, 128)
MULTIPROCESSORS = st.integers(1, 200)


def padded(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


@given(rows=ROWS, kv_heads=KV_HEADS, sms=MULTIPROCESSORS)
def test_all_programs_run_at_once_up_to_a_warp_each(rows: int, kv_heads: int, sms: int) -> None:
    pairs = padded(rows) * kv_heads
    share = share_of(pairs, sms)
    per_sm = -(-pairs * share.num_programs // sms)
    assert share.num_warps in (1, 2, 4, 8)
    assert per_sm * share.num_warps <= MOST_WARPS or share.num_warps == 1
    assert share.num_programs == 1 or per_sm == 1


@given(rows=ROWS, kv_heads=KV_HEADS, sms=MULTIPROCESSORS, max_rows=ROWS)
def test_rows_of_several_programs_find_room(
    rows: int, kv_heads: int, sms: int, max_rows: int
) -> None:
    if rows <= max_rows and share_of(padded(rows) * kv_heads, sms).num_programs > 1:
        assert rows <= most_split_rows(max_rows, kv_heads, sms) <= max_rows


@given(pairs=st.integers(1, 4096), sms=MULTIPROCESSORS)
def test_more_rows_never_get_more_warps(pairs: int, sms: int) -> None:
    fewer, more = share_of(pairs, sms), share_of(pairs + 1, sms)
    assert more.num_warps <= fewer.num_warps
    assert more.num_programs <= fewer.num_programs


def test_a_few_rows_of_long_contexts_fill_the_device() -> None:
    for kv_heads in (1, 2, 4, 8):
        share = share_of(kv_heads, SMS)
        assert share.num_programs * kv_heads * 2 > SMS
        # Each program has a chunk at least, of a context that is cut into as many as there may be.
        assert share.num_programs <= MAX_CHUNKS
    assert SOME_CHUNKS <= MAX_CHUNKS


@pytest.mark.parametrize(
    "pairs, share",
    [
        (8, Share(16, 8, 1)), (64, Share(2, 8, 1)), (128, Share(1, 8, 1)), (256, Share(1, 4, 2)),
        (512, Share(1, 2, 2)), (1024, Share(1, 1, 1)), (4096, Share(1, 1, 1)),
    ],
)  # fmt: skip
def test_as_measured(pairs: int, share: Share) -> None:
    assert share_of(pairs, SMS) == share
