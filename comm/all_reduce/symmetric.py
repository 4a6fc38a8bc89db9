"""All-reduce inside torch symmetric memory: peers read each other's buffer over NVLink.

One buffer a group, allocated and met once, before any capture, and kept as long as the process:
graphs of all sizes and eager calls share it. Never uses NVLink multicast. Serves bfloat16 and
float32; float16 is left to NCCL. Ranks sum in rank order.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory

from lockstep.comm.groups import Group

_ALIGNMENT_BYTES = 16
_TWO_SHOT_OUT_SIZES = (2, 4, 8)
_PROBE_TIMEOUT_S = 10.0
_PROBE_BYTES = 4096
_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class SymmetricBuffer:
    """The buffer of one group that all its ranks can read."""

    data: Tensor  # [max_bytes] uint8
    handle: Any
    group_name: str
    size: int

    @classmethod
    def create(cls, group: Group, max_bytes: int) -> "SymmetricBuffer":
        """Allocate and meet. Called by all ranks of the group; not while capturing."""
        # Read by torch when it meets. Multicast needs a fabric that these sums do without.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        data = _symmetric_memory.empty(max_bytes, dtype=torch.uint8, device=group.device)
        handle = _symmetric_memory.rendezvous(data, group.device_group)
        return cls(data, handle, group.device_group.group_name, group.size)

    def filled_from(self, x: Tensor) -> Tensor:
        """A flat view of the buffer that holds a copy of ``x``."""
        view = self.data[: x.numel() * x.element_size()].view(x.dtype)
        # torch's one-kernel copy-and-reduce does not join its threads between copy and signal.
        view.copy_(x.view(-1))
        return view

    def holds(self, x: Tensor) -> bool:
        num_bytes = x.numel() * x.element_size()
        return (
            x.dtype in _DTYPES
            and x.device == self.data.device
            and 0 < num_bytes <= self.data.numel()
            and num_bytes % _ALIGNMENT_BYTES == 0
            and x.storage_offset() * x.element_size() % _ALIGNMENT_BYTES == 0
        )


class OneShotAllReduce:
    """Every rank reads and sums everything: least latency for small sizes."""

    name = "one_shot"
    buffer = "symmetric"

    def __init__(self, buffer: SymmetricBuffer) -> None:
        self._buffer = buffer

    def supports(self, x: Tensor) -> bool:
        return self._buffer.holds(x)

    def __call__(self, x: Tensor) -> Tensor:
        source = self._buffer.filled_from(x)
        torch.ops.symm_mem.one_shot_all_reduce_out(
            source, "sum", self._buffer.group_name, x.view(-1)
        )
        return x


class TwoShotAllReduce:
    """Every rank sums its share, then all gather the shares: less traffic for larger sizes."""

    name = "two_shot"
    buffer = "symmetric"

    def __init__(self, buffer: SymmetricBuffer) -> None:
        self._buffer = buffer

    def supports(self, x: Tensor) -> bool:
        return self._buffer.holds(x)

    def __call__(self, x: Tensor) -> Tensor:
        source = self._buffer.filled_from(x)
        name = self._buffer.group_name
        if self._buffer.size in _TWO_SHOT_OUT_SIZES:
            torch.ops.symm_mem.two_shot_all_reduce_out(source, "sum", name, x.view(-1))
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(source, "sum", name)
            x.view(-1).copy_(source)
        return x


class PeerFault(NamedTuple):
    """The place in the group of a peer that cannot be read; ``ended`` False: the copy goes on."""

    peer: int
    ended: bool


def find_bad_peer(
    buffer: SymmetricBuffer, rank: int, barrier: Callable[[], None]
) -> PeerFault | None:
    """Read a pattern from every peer's buffer with plain copies, by a deadline.

    Drivers have claimed peer access that returned wrong bytes or never returned; a copy that does
    not end can be given up, a spinning kernel cannot. ``barrier`` joins the ranks on the host.
    """
    own = buffer.data[:_PROBE_BYTES]
    own.fill_(rank + 1)
    torch.cuda.synchronize(own.device)
    barrier()
    fault = next((f for peer in range(buffer.size) if (f := _read(buffer, peer))), None)
    barrier()
    return fault


def _read(buffer: SymmetricBuffer, peer: int) -> PeerFault | None:
    seen = buffer.handle.get_buffer(peer, (_PROBE_BYTES,), torch.uint8, 0).clone()
    if not _done_in_time(_PROBE_TIMEOUT_S):
        return PeerFault(peer, ended=False)
    return None if bool((seen == peer + 1).all()) else PeerFault(peer, ended=True)


def _done_in_time(timeout_s: float) -> bool:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    deadline = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
