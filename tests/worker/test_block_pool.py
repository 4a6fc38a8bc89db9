"""The block pool: ownership, sharing, eviction, and conservation under any sequence of calls."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.worker.schedule.block_keys import extend_keys, root_key
from lockstep.worker.schedule.block_pool import BlockPool, OutOfBlocks
from lockstep.worker.schedule.lanes import arrange


def test_padding_block_is_never_handed_out_over_ten_thousand_operations() -> None:
    pool, rng, held = BlockPool(40), random.Random(1), list[list[int]]()
    for number in range(10_000):
        if held and (rng.random() < 0.5 or pool.available < 5):
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            held.append(pool.take(rng.randint(1, 5)))
            assert 0 not in held[-1]
            if rng.random() < 0.3:
                pool.publish(held[-1][0], str(number).encode())
    for block_ids in held:
        pool.release(block_ids)
    pool.check_conserved()
    assert pool.available == 39
    assert set(pool.take(39)) == set(range(1, 40))


def test_a_block_given_back_twice_or_never_taken_raises() -> None:
    pool = BlockPool(5)
    taken = pool.take(2)
    pool.release(taken)
    for wrong in (taken[:1], [0], [9], [-1]):
        with pytest.raises(ValueError, match=f"block {wrong[0]} is given back but not held"):
            pool.release(wrong)
    with pytest.raises(ValueError, match="published but not held"):
        pool.publish(3, b"key")
    with pytest.raises(OutOfBlocks, match="5 blocks wanted, 4 of 4 available"):
        pool.take(5)
    with pytest.raises(ValueError, match="num_blocks must be at least 2"):
        BlockPool(1)


def test_least_recently_used_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(5)
    old, new = pool.take(2), pool.take(2)
    for block_ids, keys in ((old, [b"a", b"b"]), (new, [b"c", b"d"])):
        for block_id, key in zip(block_ids, keys, strict=True):
            pool.publish(block_id, key)
    pool.release(old)
    pool.release(new)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (0, 4, 0)
    assert pool.take(1) == [old[1]]
    assert pool.find([b"a", b"b"]) == old[:1]
    pool.share(old[:1])
    pool.release(old[:1])
    assert pool.take(2) == [new[1], new[0]]
    assert pool.find([b"a"]) == old[:1]


def test_first_block_of_a_key_stays_and_forgotten_blocks_are_not_found() -> None:
    pool = BlockPool(6)
    first, second, third = pool.take(3)
    pool.publish(first, b"k")
    pool.publish(second, b"k")
    assert pool.find([b"k", b"k"]) == [first, first]
    pool.release([second, third])
    pool.publish(first, b"other")
    pool.share([first])
    pool.release([first])
    pool.forget([first])
    assert pool.find([b"k"]) == []
    pool.release([first])
    pool.check_conserved()
    (cached,) = pool.take(1)
    pool.publish(cached, b"z")
    pool.release([cached])
    pool.forget([cached])
    assert pool.num_free == 5


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=60))
def test_conserved_after_any_calls(calls: list[tuple[int, int]]) -> None:
    pool, held = BlockPool(12), list[list[int]]()
    for call, number in calls:
        mine = held[number % len(held)] if held else []
        if call == 0 and number + 1 <= pool.available:
            held.append(pool.take(number + 1))
        elif call == 1 and mine:
            held.remove(mine)
            pool.release(mine)
        elif call == 2 and mine:
            pool.publish(mine[0], bytes([number]))
        elif call == 3 and (found := pool.find([bytes([number])])):
            pool.share(found)
            held.append(found)
        elif call == 4 and mine:
            pool.forget(mine)
        pool.check_conserved(held)
        assert pool.num_free + pool.num_cached + pool.num_held == pool.total


class Tokens:
    """What extend_keys needs of a request."""

    def __init__(self, ids: bytes, salt: str = "") -> None:
        self.packed_ids, self.cache_salt, self.block_keys = ids, salt, list[bytes]()


def keys_of(ids: bytes, count: int, salt: str = "") -> list[bytes]:
    request = Tokens(ids, salt)
    extend_keys(request, count, 2)
    return request.block_keys


def test_keys_are_wide_stable_and_depend_on_all_tokens_before() -> None:
    ids = bytes(range(24))
    keys = keys_of(ids, 3)
    assert len(set(keys)) == 3 and all(len(key) == 32 for key in keys)
    assert keys[0].hex().startswith("ab719860720930c8")
    changed = keys_of(b"\xff" + ids[1:], 3)
    assert not set(keys) & set(changed)
    assert keys_of(ids[:8] + bytes(16), 3)[0] == keys[0]
    assert not set(keys) & set(keys_of(ids, 3, salt="tenant"))
    assert root_key(adapter="ab", salt="c") != root_key(adapter="a", salt="bc")


@given(st.integers(0, 12), st.data())
def test_lanes_stay_compact_and_moves_do_not_collide(num_lanes: int, data: st.DataObject) -> None:
    leaves = (
        data.draw(st.lists(st.sampled_from(range(num_lanes)), unique=True)) if num_lanes else []
    )
    num_joins = data.draw(st.integers(0, 6))
    table = [None if lane in leaves else lane for lane in range(num_lanes)] + [None] * num_joins
    final, moves, joins = arrange(num_lanes, leaves, num_joins)
    for source, target in moves:
        assert table[target] is None and table[source] is not None
        table[target], table[source] = table[source], None
    for lane in joins:
        assert table[lane] is None
        table[lane] = -1
    assert all(each is not None for each in table[:final])
    assert all(each is None for each in table[final:])
    assert len(moves) <= max(0, len(leaves) - num_joins)
