"""Rows pushed between ranks without a barrier arrive whole, however their steps interleave."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from push_protocol import WRAP, Ranks, Stuck, expected

from lockstep.comm.all_reduce.push_buffer import NUM_BUFFERS, buffer_bytes

# Rows of each call: graphs of several sizes and eager calls between them.
_CALLS = st.lists(st.integers(1, 4), min_size=1, max_size=5)
_PROGRAMS = st.lists(st.integers(1, 3), min_size=8, max_size=8)


@st.composite
def _speeds(draw: st.DrawFn) -> list[int]:
    world = draw(st.integers(2, 8))
    return draw(st.lists(st.sampled_from([1, 5, 50]), min_size=world + 1, max_size=world + 1))


@settings(max_examples=30)
@given(
    _CALLS, _speeds(), st.integers(0, 1 << 16), st.sampled_from([0, 7, WRAP - 2, WRAP - 1]),
    _PROGRAMS,
)  # fmt: skip
def test_every_rank_reads_every_word_of_every_call(
    calls, speeds, seed, first_epoch, programs
) -> None:
    ranks = Ranks(calls, speeds, NUM_BUFFERS, first_epoch, programs)
    ranks.run(seed)
    assert [sorted(found) for found in ranks.results] == [expected(ranks)] * ranks.world
    assert ranks.epochs[0] == ranks.epochs[-1]


def test_with_one_buffer_a_word_is_lost() -> None:
    """The fast one of two ranks writes its next row over what the slow one has not read."""
    with pytest.raises(Stuck, match="wait for ever"):
        for seed in range(100):
            Ranks([1, 1], [50, 1, 50], 1).run(seed)


def test_programs_that_do_not_run_at_once_may_wait_for_ever() -> None:
    """Each rank's only place may be taken by a program whose row the other has not begun."""
    with pytest.raises(Stuck, match="wait for ever"):
        for seed in range(100):
            Ranks([3], [5, 5, 5], NUM_BUFFERS, programs=[2, 3], places=1).run(seed)


def test_ranks_that_count_a_row_differently_wait_and_never_mix_words() -> None:
    ranks = Ranks([1, 2, 1], [5, 5, 5], NUM_BUFFERS)
    ranks.epochs[1][1] = 1
    with pytest.raises(Stuck):
        ranks.run(0)


def test_memory_of_a_buffer() -> None:
    """Of 8 ranks, 128 rows of 8 KiB: twice, for the two buffers, and twice, for the flags."""
    assert buffer_bytes(8, 128, 8192) == 2 * 128 * 8 * 2 * 8192
