"""Collectives of one group, with deadlines, a latched error and a ledger. Size 1 does nothing."""

from collections.abc import Callable
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, BarrierOptions, BroadcastOptions

from lockstep.comm.all_reduce.base import AddNorm
from lockstep.comm.all_reduce.choose import AllReduceTable
from lockstep.comm.all_reduce.gloo_nccl import library_all_reduce
from lockstep.comm.all_reduce.table import Choice
from lockstep.comm.errors import CommError
from lockstep.comm.groups import Group
from lockstep.comm.ledger import Ledger, LedgerEntry

_T = TypeVar("_T")
_FRAME_BYTES = 512
_LENGTH_BYTES = 8
_CONNECT_ELEMENTS = 64


class Communicator:
    """What models and runners communicate through; one per group, None for a group of one.

    ``ranks`` are global, ``rank`` is this one's place in them. Tensor operations run on the
    group's device in stream order, object operations and ``barrier`` on the host.

    Raises (every operation):
        PeerLost: a rank's process is gone; names it.
        CommTimeout: a rank did not take part before the deadline; names it.
        CommError: the error that ended the group, again at every call.
    """

    def __init__(
        self,
        group: Group | None,
        all_reduce: AllReduceTable | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.group = group
        self.ledger = ledger or Ledger()
        self.name = group.name if group else "single"
        self.rank = group.rank if group else 0
        self.size = group.size if group else 1
        self.ranks = group.ranks if group else (0,)
        if group is not None:
            self.table = all_reduce or _library_table(group)
            self._gather_options = AllgatherOptions()
            self._gather_options.asyncOp = False

    @classmethod
    def single(cls, global_rank: int = 0) -> "Communicator":
        """A group of one."""
        communicator = cls(None)
        communicator.ranks = (global_rank,)
        return communicator

    def outside_compilation(self) -> "Communicator":
        """The same one for code that is compiled around it: its sums are called as ever."""
        if self.size == 1:
            return self
        twin = copy(self)
        for name in ("all_reduce", "all_reduce_add_norm"):
            vars(twin)[name] = torch.compiler.disable(getattr(self, name))  # type: ignore[no-untyped-call]
        return twin

    @property
    def all_reduce_choice(self) -> str:
        """The table of all-reduces by size, as text; it belongs into the manifest."""
        return "none" if self.group is None else self.table.text

    @property
    def buffer_bytes(self) -> int:
        """Device memory of the fixed buffers that all-reduces work in."""
        return 0 if self.group is None else self.table.buffer_bytes

    def connect(self) -> None:
        """Use every way to communicate once, so that libraries make their connections now."""
        group = self.group
        if group is None:
            return
        group.check()
        x = torch.zeros(_CONNECT_ELEMENTS, device=group.device)
        try:
            for algorithm in self.table.algorithms.values():
                algorithm(x)
        except RuntimeError as error:
            raise group.failed("connect", error) from error
        self.all_gather(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks. ``x`` may be overwritten; the result is what returns."""
        group = self.group
        if group is None:
            return x
        group.check()
        x = x.contiguous()
        algorithm = self.table.select(x)
        if self.ledger.active:
            self._note("all_reduce", algorithm.name, x, algorithm.buffer)
        try:
            return algorithm(x)
        except RuntimeError as error:
            raise group.failed("all_reduce", error) from error

    def all_reduce_add_norm(
        self, x: Tensor, residual: Tensor, norm: AddNorm
    ) -> tuple[Tensor, Tensor]:
        """``norm.add`` of the sum of ``x`` over the ranks and ``residual``, each [rows, size].

        One operation where the table has one for this size, else ``all_reduce`` and the norm.
        ``x`` may be overwritten.
        """
        group = self.group
        fused = None if group is None else self.table.select_fused(x)
        if group is None or fused is None:
            return norm.add(self.all_reduce(x), residual)
        group.check()
        if self.ledger.active:
            self._note("all_reduce_add_norm", fused.name, x, fused.buffer)
        try:
            return fused(x, residual, norm)
        except RuntimeError as error:
            raise group.failed("all_reduce_add_norm", error) from error

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[...] on each rank -> [size, ...] in rank order; ``out`` must be contiguous."""
        group = self.group
        if group is None:
            return x.unsqueeze(0) if out is None else out.copy_(x.unsqueeze(0))
        group.check()
        x = x.contiguous()
        if out is None:
            out = x.new_empty((self.size, *x.shape))
        if self.ledger.active:
            self._note("all_gather", "library", x, "")
        self._wait(
            group, "all_gather",
            lambda: group.device_group._allgather_base(
                out.view(-1), x.view(-1), self._gather_options
            ),
        )  # fmt: skip
        return out

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Overwrite ``x`` with that of rank ``src`` of the group."""
        group = self.group
        if group is None:
            return x
        group.check()
        if self.ledger.active:
            self._note("broadcast", "library", x, "")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = src, 0, False
        self._wait(group, "broadcast", lambda: group.device_group.broadcast([x], options))
        return x

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once all ranks have called this, on the host."""
        group = self.group
        if group is None:
            return
        group.check()
        options = BarrierOptions()
        options.timeout = timedelta(seconds=timeout_s or group.timeout_s)
        self._wait(group, "barrier", lambda: group.host_group.barrier(options))

    def all_gather_object(self, obj: Any, timeout_s: float | None = None) -> list[Any]:
        """What each rank passed, in rank order, as msgpack's plain types. On the host."""
        data = msgspec.msgpack.encode(obj)
        group = self.group
        if group is None:
            return [msgspec.msgpack.decode(data)]
        group.check()
        frames = self._gather_bytes(group, data, _FRAME_BYTES, timeout_s)
        longest = max(int.from_bytes(frame[:_LENGTH_BYTES], "little") for frame in frames)
        if longest > _FRAME_BYTES - _LENGTH_BYTES:
            frames = self._gather_bytes(group, data, longest + _LENGTH_BYTES, timeout_s)
        return [_unframed(frame) for frame in frames]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """What rank ``src`` of the group passed. On the host."""
        return self.all_gather_object(obj if self.rank == src else None)[src]

    def retire(self) -> None:
        """Wait until no watchdog thread looks at earlier work of this group any more.

        A watchdog polls events of finished operations, which is not allowed while this device
        captures; to be called with the device idle.
        """
        if self.group is not None and self.group.device.type == "cuda":
            self.group.device_group._wait_for_pending_works()

    def give_up(self, error: Exception) -> None:
        """Say that this rank has failed by itself, so that peers that wait for it learn why."""
        if self.group is None:
            return
        # A CommError names another rank already; reporting it as a cause would accuse this one.
        if not isinstance(error, CommError):
            self.group.peers.report(f"{type(error).__name__}: {error}")
        self.group.latch(CommError(f"this rank gave up: {error}"))

    def _gather_bytes(
        self, group: Group, data: bytes, size: int, timeout_s: float | None
    ) -> list[bytes]:
        own = torch.zeros(size, dtype=torch.uint8)
        framed = (len(data).to_bytes(_LENGTH_BYTES, "little") + data)[:size]
        own[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        gathered = torch.empty(size * self.size, dtype=torch.uint8)
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s or group.timeout_s)
        self._wait(
            group, "all_gather_object",
            lambda: group.host_group._allgather_base(gathered, own, options),
        )  # fmt: skip
        return [bytes(row.tolist()) for row in gathered.view(self.size, size)]

    def _note(self, op: str, algorithm: str, x: Tensor, buffer: str) -> None:
        dtype = str(x.dtype).removeprefix("torch.")
        self.ledger.note(LedgerEntry(op, algorithm, self.name, self.size, x.numel(), dtype, buffer))

    @staticmethod
    def _wait(group: Group, what: str, launch: Callable[[], Any]) -> None:
        try:
            work = launch()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise group.failed(what, error) from error


def _library_table(group: Group) -> AllReduceTable:
    library = library_all_reduce(group)
    return AllReduceTable([Choice(library.name, None)], {library.name: library})


def _unframed(frame: bytes) -> Any:
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    return msgspec.msgpack.decode(frame[_LENGTH_BYTES : _LENGTH_BYTES + length])
