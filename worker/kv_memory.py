"""Where the KV cache's memory comes from: an amount that is known, or what a device has left."""

from collections.abc import Mapping
from typing import Protocol

import torch

from lockstep.worker.config import MIN_BLOCKS, CacheConfig
from lockstep.worker.graphs.memory import kv_budget
from lockstep.worker.kv_cache import KVCache, KVLayout


class KVMemory(Protocol):
    """A cache that can be used at once, and how large it may finally be."""

    cache: KVCache

    @property
    def num_bytes(self) -> int:
        """What it holds of the device now."""
        ...

    @property
    def torch_bytes(self) -> int:
        """The part of ``num_bytes`` that torch's allocator holds."""
        ...

    def num_blocks_left(self, others: Mapping[str, int]) -> int:
        """How many blocks there may be beside ``others``, bytes of the device by holder."""
        ...

    def close(self) -> None: ...


class FixedMemory:
    """All blocks from the start, in ordinary memory."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.cache = KVCache.allocate(layout, num_blocks, device)

    @property
    def num_bytes(self) -> int:
        return self.cache.storage.nbytes

    @property
    def torch_bytes(self) -> int:
        return self.cache.storage.nbytes

    def num_blocks_left(self, others: Mapping[str, int]) -> int:
        return self.cache.num_blocks

    def close(self) -> None:
        """Nothing to do: the memory goes with the last tensor."""


class MappedMemory:
    """Addresses for the whole device with a few blocks behind them; the rest is mapped last."""

    def __init__(self, layout: KVLayout, config: CacheConfig, device: torch.device) -> None:
        from lockstep.worker.device_memory import MappedRange

        self._layout = layout
        self._config = config
        self._total_bytes = torch.cuda.mem_get_info(device)[1]
        self._range = MappedRange(self._total_bytes, device)
        self._range.map_up_to(MIN_BLOCKS * layout.block_bytes)
        max_blocks = self._range.reserved_bytes // layout.block_bytes
        storage = self._range.tensor((max_blocks, *layout.block_shape), layout.dtype)
        self.cache = KVCache(layout, storage, self._range.map_up_to)
        self.cache.grow(MIN_BLOCKS)

    @property
    def num_bytes(self) -> int:
        return self._range.mapped_bytes

    @property
    def torch_bytes(self) -> int:
        return 0

    def num_blocks_left(self, others: Mapping[str, int]) -> int:
        """Blocks up to ``gpu_memory_utilization``, now that all else has its memory."""
        # The last block may cost a whole granule more.
        whole = {**others, "unit of mapping": self._range.granularity}
        return blocks_beside(whole, self._total_bytes, self._layout, self._config)

    def close(self) -> None:
        self._range.close()


def blocks_beside(
    others: Mapping[str, int], total_bytes: int, layout: KVLayout, config: CacheConfig
) -> int:
    """Blocks up to ``gpu_memory_utilization`` of a device, beside what ``others`` hold."""
    num_bytes = kv_budget(
        total_bytes=total_bytes,
        others=others,
        utilization=config.gpu_memory_utilization,
        least_bytes=MIN_BLOCKS * layout.block_bytes,
    )
    return layout.blocks_in(num_bytes)
