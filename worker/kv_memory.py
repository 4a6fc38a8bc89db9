"""Where the KV cache's memory comes from: an amount that is known, or what a device has left."""

from typing import Protocol

import torch

from lockstep.worker.config import CacheConfig
from lockstep.worker.graphs.memory import kv_budget
from lockstep.worker.kv_cache import MIN_BLOCKS, KVCache, KVLayout


class KVMemory(Protocol):
    """A cache that can be used at once, and how large it may finally be."""

    cache: KVCache

    def num_blocks_left(self) -> int: ...

    def close(self) -> None: ...


class FixedMemory:
    """All blocks from the start, in ordinary memory."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.cache = KVCache.allocate(layout, num_blocks, device)

    def num_blocks_left(self) -> int:
        return self.cache.num_blocks

    def close(self) -> None:
        """Nothing to do: the memory goes with the last tensor."""


class MappedMemory:
    """Addresses for the whole device with a few blocks behind them; the rest is mapped last."""

    def __init__(self, layout: KVLayout, config: CacheConfig, device: torch.device) -> None:
        from lockstep.worker.device_memory import MappedRange

        self._layout = layout
        self._config = config
        self._device = device
        self._range = MappedRange(torch.cuda.mem_get_info(device)[1], device)
        self._range.map_up_to(MIN_BLOCKS * layout.block_bytes)
        max_blocks = self._range.reserved_bytes // layout.block_bytes
        storage = self._range.tensor((max_blocks, *layout.block_shape), layout.dtype)
        self.cache = KVCache(layout, storage, self._range.map_up_to)
        self.cache.grow(MIN_BLOCKS)

    def num_blocks_left(self) -> int:
        """Blocks up to ``gpu_memory_utilization``, now that all else has its memory."""
        used, total = used_and_total_bytes(self._device)
        # The last block may cost a whole granule more.
        other_bytes = used - self._range.mapped_bytes + self._range.granularity
        return blocks_beside(other_bytes, total, self._layout, self._config)

    def close(self) -> None:
        self._range.close()


def blocks_beside(other_bytes: int, total_bytes: int, layout: KVLayout, config: CacheConfig) -> int:
    """Blocks up to ``gpu_memory_utilization`` of a device, beside ``other_bytes``."""
    num_bytes = kv_budget(
        total_bytes=total_bytes,
        other_bytes=other_bytes,
        utilization=config.gpu_memory_utilization,
        least_bytes=MIN_BLOCKS * layout.block_bytes,
    )
    return layout.blocks_in(num_bytes)


def used_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Of the whole device, by all processes. (0, 0) where that is not known."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total
