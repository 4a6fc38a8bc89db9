"""What a device and torch's allocator say of memory, read at one moment."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_COMMON_POOL = (0, 0)


class DeviceBytes(NamedTuple):
    """All 0 where nobody counts, as on a CPU.

    ``used`` is by all processes. ``reserved`` is what torch's allocator of this process holds of
    that, and ``pooled`` the part of ``reserved`` that belongs to graphs.
    """

    total: int = 0
    used: int = 0
    reserved: int = 0
    pooled: int = 0

    @property
    def outside(self) -> int:
        """Used, but not through torch's allocator."""
        return self.used - self.reserved


def read_device(device: torch.device) -> DeviceBytes:
    """Waits for the device's work first."""
    if device.type != "cuda":
        return DeviceBytes()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return DeviceBytes(total, total - free, reserved, _pooled(device))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes behind tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _pooled(device: torch.device) -> int:
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) != _COMMON_POOL
    )
