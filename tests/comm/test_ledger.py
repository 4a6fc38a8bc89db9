"""Ledgers compared over threads that stand for ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.comm.compare import odd_one_out
from lockstep.comm.errors import RankMismatch
from lockstep.comm.ledger import Ledger, LedgerEntry, compare_ledgers


class _Exchange:
    """all_gather_object between threads, through the bytes that a real one would send."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=10)
        self.slots: list[bytes] = [b""] * size

    def end(self, rank: int) -> "_End":
        return _End(self, rank)


class _End:
    def __init__(self, exchange: _Exchange, rank: int) -> None:
        self._exchange = exchange
        self._rank = rank
        self.size = len(exchange.slots)
        self.ranks = tuple(10 + index for index in range(self.size))

    def all_gather_object(self, obj, timeout_s=None):
        self._exchange.slots[self._rank] = msgspec.msgpack.encode(obj)
        self._exchange.barrier.wait()
        found = [msgspec.msgpack.decode(data) for data in self._exchange.slots]
        self._exchange.barrier.wait()
        return found


def _on_ranks(fn, size: int) -> list[str]:
    """Run ``fn(rank, end)`` on every rank; what each raised, as text."""
    exchange = _Exchange(size)

    def run(rank: int) -> str:
        try:
            fn(rank, exchange.end(rank))
        except RankMismatch as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def _entry(elements: int, op: str = "all_reduce") -> LedgerEntry:
    return LedgerEntry(op, "nccl", "tp", 2, elements, "bfloat16")


_ledgers = st.lists(st.integers(1, 3).map(_entry), max_size=4)


@settings(max_examples=80, deadline=None)
@given(st.lists(_ledgers, min_size=3, max_size=3))
def test_all_ranks_say_the_same_and_name_a_true_difference(ledgers) -> None:
    said = _on_ranks(lambda rank, end: compare_ledgers(ledgers[rank], end, "size 8"), 3)
    if ledgers[0] == ledgers[1] == ledgers[2]:
        assert said == [""] * 3
        return
    assert said[0] and len(set(said)) == 1
    odd, usual = odd_one_out([tuple(ledger) for ledger in ledgers])
    pairs = zip_longest(ledgers[odd], ledgers[usual])
    position = next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)
    assert f"rank {10 + odd} recorded {len(ledgers[odd])} operations at size 8" in said[0]
    assert f"rank {10 + usual} recorded {len(ledgers[usual])} operations at size 8" in said[0]
    assert f"first difference at operation {position}: rank {10 + odd} " in said[0]


def test_the_odd_one_is_the_minority() -> None:
    assert odd_one_out("aaa") is None
    assert odd_one_out("aba") == (1, 0)
    assert odd_one_out("baa") == (0, 1)


def _launching(ledgers, launched):
    def run(rank: int, end: _End) -> None:
        ledger = Ledger()
        with ledger.compared_before_launch(end, "size 8, body", timeout_s=5):
            for entry in ledgers[rank]:
                ledger.note(entry)
                launched[rank] += 1

    return run


@pytest.mark.parametrize(
    "other, num_launched, message",
    [
        ([_entry(1), _entry(2)], 2, ""),
        ([_entry(1), _entry(3)], 1, "rank 11 operation 1 at size 8, body: all_reduce by nccl"),
        ([_entry(1)], 1, "rank 11 operation 1 at size 8, body: nothing more"),
        ([], 0, "rank 11 operation 0 at size 8, body: nothing more"),
    ],
)
def test_nothing_is_launched_that_differs(other, num_launched: int, message: str) -> None:
    ledgers, launched = [[_entry(1), _entry(2)], other], [0, 0]
    said = _on_ranks(_launching(ledgers, launched), 2)
    assert launched == [num_launched] * 2
    assert all(message in text for text in said) and bool(said[0]) == bool(message)


def test_ledger_hears_only_inside_a_block_and_after_an_error_no_more() -> None:
    ledger = Ledger()
    ledger.note(_entry(1))
    with ledger.recorded() as entries:
        assert ledger.active
        ledger.note(_entry(2))
    ledger.note(_entry(3))
    assert entries == [_entry(2)] and not ledger.active
    end = _Exchange(1).end(0)
    with pytest.raises(KeyError), ledger.compared_before_launch(end, "size 1", timeout_s=1):
        raise KeyError
    assert not ledger.active
