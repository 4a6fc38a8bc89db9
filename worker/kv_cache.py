"""The bytes of the KV cache on one rank. Which block belongs to whom is the block pool's affair."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.worker.config import MIN_BLOCKS, CacheConfig

CPU_KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a block: [num_layers, 2 (k, v), block_size, num_kv_heads, head_dim].

    The block is the outermost dim of the cache, so no stride depends on the number of blocks and
    every layer view begins in block 0.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        return self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim

    @property
    def block_bytes(self) -> int:
        return torch.Size(self.block_shape).numel() * self.dtype.itemsize

    def blocks_in(self, num_bytes: int) -> int:
        """How many blocks fit, at least ``MIN_BLOCKS``.

        Raises:
            ValueError: fewer fit.
        """
        num_blocks = num_bytes // self.block_bytes
        if num_blocks < MIN_BLOCKS:
            least = MIN_BLOCKS * self.block_bytes
            raise ValueError(f"kv_cache_memory_bytes must be at least {least}, got {num_bytes}")
        return num_blocks


def fixed_num_blocks(layout: KVLayout, config: CacheConfig, device: torch.device) -> int | None:
    """Blocks that the configuration or the device fixes; None where memory is to be measured."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        return layout.blocks_in(config.kv_cache_memory_bytes)
    return layout.blocks_in(CPU_KV_CACHE_BYTES) if device.type == "cpu" else None


class KVCache:
    """Keys and values of all layers, ``num_blocks`` of them usable.

    Args:
        storage: [max_blocks, *layout.block_shape]; on CUDA a view of reserved addresses.
        map_up_to: makes the first so many bytes of ``storage`` real; None if all of it is.
    """

    def __init__(
        self, layout: KVLayout, storage: Tensor, map_up_to: Callable[[int], object] | None = None
    ) -> None:
        self.layout = layout
        self.storage = storage
        self.num_blocks = 0 if map_up_to else storage.shape[0]
        self._map_up_to = map_up_to
        self._layers = [(storage[:, i, 0], storage[:, i, 1]) for i in range(layout.num_layers)]

    @classmethod
    def allocate(cls, layout: KVLayout, num_blocks: int, device: torch.device) -> "KVCache":
        """A cache of ordinary memory, zeroed.

        Raises:
            ValueError: the device does not have that much.
        """
        shape = (num_blocks, *layout.block_shape)
        try:
            storage = torch.zeros(shape, dtype=layout.dtype, device=device)
        except RuntimeError as error:
            raise ValueError(
                f"kv_cache_memory_bytes or num_gpu_blocks_override asks for {num_blocks} KV blocks "
                f"of {layout.block_bytes} bytes, more than {device} can give"
            ) from error
        return cls(layout, storage)

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    def layer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """k and v, each a strided view [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._layers[layer_id]

    def grow(self, num_blocks: int) -> None:
        """Make ``num_blocks`` usable. Addresses do not change, so captured graphs stay valid.

        Raises:
            ValueError: more than was reserved, or fewer than are in use already.
        """
        limit = self.storage.shape[0]
        if not self.num_blocks <= num_blocks <= limit:
            raise ValueError(
                f"num_blocks must be in [{self.num_blocks}, {limit}], got {num_blocks}"
            )
        if self._map_up_to is not None:
            self._map_up_to(num_blocks * self.layout.block_bytes)
        if self.num_blocks == 0:
            # Padded lanes read the padding block before they write it.
            self.storage[0].zero_()
        self.num_blocks = num_blocks
