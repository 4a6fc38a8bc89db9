"""Layout, sizing and growth of the KV cache."""

import pytest
import torch

from lockstep.worker.config import CacheConfig
from lockstep.worker.kv_cache import CPU_KV_CACHE_BYTES, KVCache, KVLayout, fixed_num_blocks

LAYOUT = KVLayout(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
CPU = torch.device("cpu")


def test_strides_do_not_depend_on_the_number_of_blocks_and_views_begin_in_block_0() -> None:
    small, large = (KVCache.allocate(LAYOUT, n, CPU) for n in (2, 50))
    for layer_id in range(3):
        for a, b in zip(small.layer(layer_id), large.layer(layer_id), strict=True):
            assert a.stride() == b.stride()
            offset = (b.data_ptr() - large.storage.data_ptr()) // 4
            assert offset + b[0].numel() <= large.storage[0].numel()


def test_no_two_slots_share_memory() -> None:
    cache = KVCache.allocate(LAYOUT, 5, CPU)
    for number in range(6):
        cache.layer(number // 2)[number % 2].fill_(number + 1)
    assert torch.bincount(cache.storage.flatten().int(), minlength=7).tolist() == [
        0, *[5 * 4 * 2 * 8] * 6
    ]  # fmt: skip


def test_block_bytes_and_blocks_in() -> None:
    assert LAYOUT.block_bytes == 3 * 2 * 4 * 2 * 8 * 4
    assert LAYOUT.blocks_in(10 * LAYOUT.block_bytes + 1) == 10
    with pytest.raises(ValueError, match=f"at least {2 * LAYOUT.block_bytes}, got 10"):
        LAYOUT.blocks_in(10)


def test_override_beats_bytes_beats_the_cpu_default() -> None:
    override = CacheConfig(num_gpu_blocks_override=7, kv_cache_memory_bytes=1 << 20)
    assert fixed_num_blocks(LAYOUT, override, CPU) == 7
    by_bytes = CacheConfig(kv_cache_memory_bytes=9 * LAYOUT.block_bytes)
    assert fixed_num_blocks(LAYOUT, by_bytes, CPU) == 9
    assert fixed_num_blocks(LAYOUT, CacheConfig(), CPU) == CPU_KV_CACHE_BYTES // LAYOUT.block_bytes
    assert fixed_num_blocks(LAYOUT, CacheConfig(), torch.device("cuda")) is None


def test_growth_maps_zeroes_only_the_padding_block_and_keeps_addresses() -> None:
    mapped: list[int] = []
    storage = torch.full((8, *LAYOUT.block_shape), 3.0)
    cache = KVCache(LAYOUT, storage, mapped.append)
    address = cache.layer(1)[1].data_ptr()
    cache.grow(2)
    cache.grow(6)
    assert mapped == [2 * LAYOUT.block_bytes, 6 * LAYOUT.block_bytes]
    assert cache.num_blocks == 6 and cache.layer(1)[1].data_ptr() == address
    assert storage[0].eq(0).all() and storage[1:].eq(3).all()
    with pytest.raises(ValueError, match=r"num_blocks must be in \[6, 8\], got 9"):
        cache.grow(9)
