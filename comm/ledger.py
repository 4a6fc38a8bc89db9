"""What ranks communicate, in order: recorded, compared before launch, compared after capture."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Protocol

import msgspec

from lockstep.comm.compare import odd_one_out
from lockstep.comm.errors import RankMismatch


# Producer: each rank's Communicator. Consumer: the ranks of its lockstep group, for comparison.
class LedgerEntry(msgspec.Struct, frozen=True, array_like=True):
    """One communication operation. Holds no address, so equal work gives equal entries.

    ``group`` is the name of the group (its ranks differ between replicas), ``buffer`` that of a
    fixed buffer, at ``offset`` bytes, or empty.
    """

    op: str
    algorithm: str
    group: str
    group_size: int
    elements: int
    dtype: str
    buffer: str = ""
    offset: int = 0

    def __str__(self) -> str:
        place = f" in {self.buffer}+{self.offset}" if self.buffer else ""
        return (
            f"{self.op} by {self.algorithm} over {self.group}({self.group_size}), "
            f"{self.elements} x {self.dtype}{place}"
        )


class HostExchange(Protocol):
    """The part of a Communicator that comparing needs."""

    ranks: tuple[int, ...]
    size: int

    def all_gather_object(self, obj: Any, timeout_s: float | None = None) -> list[Any]: ...


class Ledger:
    """The operations of one rank, over all its groups, while somebody listens."""

    def __init__(self) -> None:
        self.active = False
        self._note: Callable[[LedgerEntry], None] = _ignore

    def note(self, entry: LedgerEntry) -> None:
        """Called before an operation is launched, while ``active``."""
        self._note(entry)

    @contextmanager
    def recorded(self) -> Iterator[list[LedgerEntry]]:
        """Collect the operations of the block."""
        entries: list[LedgerEntry] = []
        with self._listening(entries.append):
            yield entries

    @contextmanager
    def compared_before_launch(
        self, over: HostExchange, descriptor: str, timeout_s: float
    ) -> Iterator[None]:
        """Compare each operation of the block over ``over`` before it is launched.

        The end of the block is compared too, so that a rank with fewer operations is found.

        Raises:
            RankMismatch: on every rank, at the first operation that differs.
        """
        position = 0

        def compare(entry: LedgerEntry | None) -> None:
            nonlocal position
            _compare_one(entry, position, over, descriptor, timeout_s)
            position += 1

        with self._listening(compare):
            yield
        compare(None)

    @contextmanager
    def _listening(self, note: Callable[[LedgerEntry], None]) -> Iterator[None]:
        assert not self.active, "a ledger has one listener at a time"
        self.active, self._note = True, note
        try:
            yield
        finally:
            self.active, self._note = False, _ignore


def compare_ledgers(
    entries: list[LedgerEntry], over: HostExchange, descriptor: str, timeout_s: float | None = None
) -> None:
    """Compare whole ledgers over a group.

    Raises:
        RankMismatch: on every rank; names rank, descriptor and first differing entry.
    """
    found = over.all_gather_object((descriptor, _digest(entries)), timeout_s)
    odd = odd_one_out([tuple(key) for key in found])
    if odd is None:
        return
    ledgers = [
        (name, [LedgerEntry(*row) for row in rows])
        for name, rows in over.all_gather_object((descriptor, entries), timeout_s)
    ]
    sides = [(over.ranks[index], *ledgers[index]) for index in odd]
    raise RankMismatch(_first_difference(*sides))


def _compare_one(
    entry: LedgerEntry | None, position: int, over: HostExchange, descriptor: str, timeout_s: float
) -> None:
    found = over.all_gather_object((descriptor, position, entry), timeout_s)
    rows = [(name, number, row and LedgerEntry(*row)) for name, number, row in found]
    odd = odd_one_out(rows)
    if odd is not None:
        said = [f"rank {over.ranks[index]} {_said(*rows[index])}" for index in odd]
        raise RankMismatch(f"ranks are about to launch different work: {said[0]}, {said[1]}")


def _said(descriptor: str, position: int, entry: LedgerEntry | None) -> str:
    return f"operation {position} at {descriptor}: {entry or 'nothing more'}"


_Side = tuple[int, str, list[LedgerEntry]]


def _first_difference(odd: _Side, usual: _Side) -> str:
    counts = ", ".join(
        f"rank {rank} recorded {len(entries)} operations at {descriptor}"
        for rank, descriptor, entries in (odd, usual)
    )
    for position, (ours, theirs) in enumerate(zip_longest(odd[2], usual[2])):
        if ours != theirs:
            return (
                f"{counts}; first difference at operation {position}: "
                f"rank {odd[0]} {ours or 'nothing'}, rank {usual[0]} {theirs or 'nothing'}"
            )
    return counts


def _digest(entries: list[LedgerEntry]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(entries)).hexdigest()


def _ignore(entry: LedgerEntry) -> None:
    pass
