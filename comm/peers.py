"""Who is lost when a collective fails. Knows processes and reports, not collectives."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from lockstep.comm.errors import CommError, CommTimeout, PeerLost
from lockstep.comm.process import process_gone
from lockstep.comm.rendezvous import exchange

_GRACE_S = 2.0
_POLL_S = 0.02
_REPORTED = "failed:"


# Producer: each rank when it joins. Consumer: the other ranks, to see whether it still lives.
class Member(msgspec.Struct, frozen=True):
    """A rank's process; ``place`` is equal for processes that can see each other's pids."""

    pid: int
    place: str


class Peers:
    """The processes of all ranks, and the reports of those that saw a failure."""

    def __init__(self, global_rank: int, members: dict[int, Member], store: Store) -> None:
        self._global_rank = global_rank
        self._members = members
        self._reports = PrefixStore("failed", store)
        self._place = members[global_rank].place

    @classmethod
    def meet(cls, global_rank: int, world_size: int, store: Store, timeout_s: float) -> "Peers":
        """Exchange process ids with all ranks. Raises CommTimeout that names missing ranks."""
        own = msgspec.json.encode(Member(os.getpid(), _place())).decode()
        found = exchange(
            store, "world", own, rank=global_rank, ranks=range(world_size), timeout_s=timeout_s
        )
        members = {rank: msgspec.json.decode(data, type=Member) for rank, data in found.items()}
        return cls(global_rank, members, store)

    def same_host(self, ranks: Sequence[int]) -> bool:
        return all(self._members[rank].place == self._place for rank in ranks)

    def report(self, reason: str = "") -> None:
        """Tell the others that this rank has failed; ``reason`` if it is not their doing."""
        # The store may have died with its owner; the process table still tells who is gone.
        with suppress(RuntimeError):
            self._reports.set(str(self._global_rank), _REPORTED + reason)

    def verdict(self, ranks: Sequence[int], what: str, error: Exception) -> CommError:
        """Turn a failed collective into an error that names the rank at fault.

        A rank that sees a failure reports it, so a rank that is gone or silent without a report is
        the cause and not another victim. Takes at most two seconds.
        """
        self.report()
        others = [rank for rank in ranks if rank != self._global_rank]
        deadline = time.monotonic() + _GRACE_S
        while True:
            cause = self._cause(others, what)
            if cause is not None:
                return cause
            silent = [rank for rank in others if self._report_of(rank) is None]
            if not silent or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        # Who has reported is a victim and who is silent waits, both for somebody of another group.
        outside = [rank for rank in self._members if rank not in ranks]
        cause = self._cause(outside, what)
        if cause is not None:
            return cause
        if silent and "timed out" in str(error).lower():
            return CommTimeout(f"{what}: ranks {silent} do not take part ({error})")
        where = f"while ranks {silent} saw nothing" if silent else "on all ranks"
        return CommError(f"{what} failed {where}: {error}")

    def _cause(self, ranks: Sequence[int], what: str) -> PeerLost | None:
        """The rank among these that is gone without a report, or has given up by itself."""
        # Looked up before the reports: a victim reports and then goes.
        gone = [rank for rank in ranks if self._is_gone(rank)]
        reports = {rank: self._report_of(rank) for rank in ranks}
        lost = next((rank for rank in gone if reports[rank] is None), None)
        if lost is not None:
            return PeerLost(lost, f"its process is gone, noticed in {what}")
        for rank, reason in reports.items():
            if reason:
                return PeerLost(rank, f"it gave up ({reason}), noticed in {what}")
        return None

    def _report_of(self, rank: int) -> str | None:
        with suppress(RuntimeError):
            if self._reports.check([str(rank)]):
                return self._reports.get(str(rank)).decode().removeprefix(_REPORTED)
        return None

    def _is_gone(self, rank: int) -> bool:
        member = self._members[rank]
        return member.place == self._place and process_gone(member.pid)


def _place() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
