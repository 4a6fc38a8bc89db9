"""Heads and rows over ranks: by hand for known models, by properties for all others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.parallel.shard import (
    HeadLayout,
    Shard,
    even_shard,
    padded_vocab,
    split_range,
    vocab_shard,
)

SMOL = (9, 3)


@pytest.mark.parametrize(
    ("heads", "tp_size", "local"),
    [
        (SMOL, 1, (9, 3)),
        (SMOL, 2, (6, 2)),
        (SMOL, 3, (3, 1)),
        (SMOL, 4, (3, 1)),
        ((14, 2), 4, (4, 1)),
        ((14, 2), 2, (7, 1)),
        ((32, 8), 4, (8, 2)),
        ((32, 8), 16, (2, 1)),
        ((16, 1), 3, (6, 1)),
    ],
)
def test_heads_of_a_rank(heads, tp_size, local):
    layout = HeadLayout(*heads, tp_size)
    assert (layout.num_heads_local, layout.num_kv_heads_local) == local


def test_added_group_is_zero_on_the_last_rank():
    layout = HeadLayout(*SMOL, 2)
    assert layout.kv_heads(0) == (0, 1)
    assert layout.kv_heads(1) == (2, None)
    assert layout.query_heads(1) == (6, 7, 8, None, None, None)


def test_replicated_kv_head_shares_out_its_queries():
    layout = HeadLayout(14, 2, 4)
    assert [layout.kv_heads(rank) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert layout.query_heads(0) == (0, 1, 2, 3)
    assert layout.query_heads(1) == (4, 5, 6, None)
    assert layout.query_heads(3) == (11, 12, 13, None)


@st.composite
def layouts(draw):
    kv_heads = draw(st.integers(1, 12))
    heads = kv_heads * draw(st.integers(1, 12))
    return HeadLayout(heads, kv_heads, draw(st.integers(1, min(heads, 16))))


@settings(deadline=None)
@given(layouts())
def test_every_query_head_is_on_one_rank_beside_its_kv_head(layout):
    seen = []
    for rank in range(layout.tp_size):
        kv_heads, query_heads = layout.kv_heads(rank), layout.query_heads(rank)
        assert len(kv_heads) == layout.num_kv_heads_local
        assert len(query_heads) == layout.num_heads_local
        for place, head in enumerate(query_heads):
            if head is not None:
                assert kv_heads[place // layout.query_share] == head // layout.group_size
                seen.append(head)
    assert sorted(seen) == list(range(layout.num_heads))


@settings(deadline=None)
@given(layouts(), st.integers(1, 8))
def test_a_shard_is_the_rows_of_its_heads(layout, head_dim):
    for rank in range(layout.tp_size):
        for heads, shard in (
            (layout.query_heads(rank), layout.query_shard(rank, head_dim, dim=1)),
            (layout.kv_heads(rank), layout.kv_shard(rank, head_dim)),
        ):
            rows = [*range(shard.start, shard.start + shard.length)]
            rows += [None] * (shard.local_size - shard.length)
            expected = [
                None if head is None else head * head_dim + i
                for head in heads
                for i in range(head_dim)
            ]
            assert rows == expected


@settings(deadline=None)
@given(layouts())
def test_no_padding_where_heads_divide(layout):
    if layout.num_kv_heads % layout.tp_size == 0:
        assert layout.num_heads_local * layout.tp_size == layout.num_heads
        assert all(None not in layout.query_heads(rank) for rank in range(layout.tp_size))


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 16))
def test_vocabulary_is_covered_once_by_equal_shares(vocab_size, tp_size):
    shards = [vocab_shard(vocab_size, tp_size, rank) for rank in range(tp_size)]
    assert len({shard.local_size for shard in shards}) == 1
    assert sum(shard.local_size for shard in shards) == padded_vocab(vocab_size, tp_size)
    rows = [row for shard in shards for row in range(shard.start, shard.start + shard.length)]
    assert rows == list(range(vocab_size))
    assert padded_vocab(vocab_size, tp_size) - vocab_size < tp_size


def test_even_shard():
    assert split_range(12, 3, 1) == (4, 8)
    assert even_shard(12, 3, 2, dim=1) == Shard(1, 12, start=8, length=4, local_size=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadLayout(9, 2, 1), "num_heads 9 is not a multiple of num_kv_heads 2"),
        (lambda: HeadLayout(4, 2, 8), "tensor_parallel_size must be at most num_heads=4, got 8"),
        (lambda: HeadLayout(0, 2, 8), "must be at least 1, got 0, 2, 8"),
        (
            lambda: split_range(10, 4, 0, what="intermediate_size"),
            "tensor_parallel_size must divide intermediate_size=10, got 4",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()
