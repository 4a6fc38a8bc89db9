"""Groups of ranks: their torch process groups, deadlines, and the one error that ends them."""

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import ProcessGroup, Store

from lockstep.comm.errors import CommError
from lockstep.comm.peers import Peers


class Group:
    """A line of ranks that communicate.

    ``rank`` is the place in ``ranks``, which are global. ``error`` is the first failure: from then
    on every operation raises it.
    """

    def __init__(
        self, *, name: str, ranks: tuple[int, ...], rank: int, device: torch.device,
        device_group: ProcessGroup, host_group: ProcessGroup, timeout_s: float, peers: Peers,
    ) -> None:  # fmt: skip
        self.name = name
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.device = device
        self.timeout_s = timeout_s
        self.peers = peers
        self.error: CommError | None = None
        self._device_group: ProcessGroup | None = device_group
        self._host_group: ProcessGroup | None = host_group

    @property
    def device_group(self) -> ProcessGroup:
        """Moves tensors of ``device``; raises the latched error. On the CPU it is host_group."""
        if self._device_group is None:
            raise self._latched()
        return self._device_group

    @property
    def host_group(self) -> ProcessGroup:
        """Moves tensors of the host (gloo); raises the latched error."""
        if self._host_group is None:
            raise self._latched()
        return self._host_group

    def check(self) -> None:
        """Raise the latched error, if there is one."""
        if self.error is not None:
            raise self.error

    def failed(self, what: str, error: Exception) -> CommError:
        """Name who is at fault for ``error``, latch that and return it."""
        if self.error is None:
            self.latch(self.peers.verdict(self.ranks, f"{self.name} {what}", error))
        return self._latched()

    def latch(self, error: CommError) -> None:
        """End this group with ``error``."""
        # Set before abort: a thread that abort wakes must find the error.
        self.error = self.error or error
        self.abort()

    def abort(self) -> None:
        """Close the host group, which wakes peers that wait in it. The group is over.

        NCCL is left to the end of the process: aborting it from here has been seen to hang.
        """
        self.error = self.error or CommError(f"group {self.name} was aborted")
        host_group, self._host_group, self._device_group = self._host_group, None, None
        if host_group is not None:
            distributed.destroy_process_group(host_group)

    def _latched(self) -> CommError:
        return self.error or CommError(f"group {self.name} is closed")


class World:
    """All ranks, and the maker of their groups. One per process, since torch has one."""

    def __init__(self, *, global_rank: int, peers: Peers) -> None:
        self.global_rank = global_rank
        self.peers = peers

    @classmethod
    def join(cls, *, global_rank: int, world_size: int, store: Store, timeout_s: float) -> "World":
        """Meet all ranks. Raises CommTimeout that names those that did not come."""
        peers = Peers.meet(global_rank, world_size, store, timeout_s)
        distributed.init_process_group(
            "gloo", store=store, rank=global_rank, world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        return cls(global_rank=global_rank, peers=peers)

    def create_group(
        self, name: str, ranks: Sequence[int], *, device: torch.device, timeout_s: float
    ) -> Group | None:
        """Make one group. All ranks of the world call this for every group in the same order.

        Returns None on ranks outside, and for groups of one, which need nothing.
        """
        if len(ranks) == 1:
            return None
        timeout = timedelta(seconds=timeout_s)
        host_group = distributed.new_group(list(ranks), timeout, "gloo")
        device_group = host_group
        if device.type == "cuda":
            device_group = distributed.new_group(list(ranks), timeout, "nccl")
        if self.global_rank not in ranks:
            return None
        return Group(
            name=name, ranks=tuple(ranks), rank=list(ranks).index(self.global_rank),
            device=device, device_group=device_group, host_group=host_group,
            timeout_s=timeout_s, peers=self.peers,
        )  # fmt: skip

    def leave(self) -> None:
        """Destroy every group and the world."""
        distributed.destroy_process_group()
