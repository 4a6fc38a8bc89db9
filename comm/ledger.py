"""What ranks communicate, in order: recorded, compared before launch, compared after capture."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Protocol

import msgspec

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
    found = over.all_gather_object((descriptor, len(entries), _digest(entries)), timeout_s)
    if all(other == found[0] for other in found):
        return
    ledgers = [
        (name, [LedgerEntry(*row) for row in rows])
        for name, rows in over.all_gather_object((descriptor, entries), timeout_s)
    ]
    raise RankMismatch(_first_difference(ledgers, over.ranks))


def _compare_one(
    entry: LedgerEntry | None, position: int, over: HostExchange, descriptor: str, timeout_s: float
) -> None:
    found = over.all_gather_object((descriptor, position, entry), timeout_s)
    if all(other == found[0] for other in found):
        return
    rows = [(name, number, row and LedgerEntry(*row)) for name, number, row in found]
    usual = Counter(rows).most_common(1)[0][0]
    odd = next(index for index, row in enumerate(rows) if row != usual)
    raise RankMismatch(
        f"rank {over.ranks[odd]} is about to launch {_said(rows[odd])}; "
        f"rank {over.ranks[rows.index(usual)]} {_said(usual)}"
    )


def _said(row: tuple[str, int, LedgerEntry | None]) -> str:
    name, position, entry = row
    what = "nothing more" if entry is None else str(entry)
    return f"operation {position} at {name}: {what}"


def _first_difference(ledgers: list[tuple[str, list[LedgerEntry]]], ranks: tuple[int, ...]) -> str:
    keys = [(name, _digest(entries)) for name, entries in ledgers]
    usual = keys.index(Counter(keys).most_common(1)[0][0])
    odd = next(index for index, key in enumerate(keys) if key != keys[usual])
    (name, entries), (usual_name, usual_entries) = ledgers[odd], ledgers[usual]
    counts = (
        f"rank {ranks[odd]} recorded {len(entries)} operations at {name}, "
        f"rank {ranks[usual]} {len(usual_entries)} at {usual_name}"
    )
    for position, (ours, theirs) in enumerate(zip_longest(entries, usual_entries)):
        if ours != theirs:
            return (
                f"{counts}; first difference at operation {position}: "
                f"rank {ranks[odd]} {ours or 'nothing'}, rank {ranks[usual]} {theirs or 'nothing'}"
            )
    return counts


def _digest(entries: list[LedgerEntry]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(entries)).hexdigest()


def _ignore(entry: LedgerEntry) -> None:
    pass
