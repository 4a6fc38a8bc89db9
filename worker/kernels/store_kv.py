"""Scatter of keys and values into the slots of one layer's cache. CUDA, Triton."""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.kernels.chain import chained, follow


@triton.jit
def _store_kv_kernel(
    k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, slots_ptr,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_PAD)[:, None]
    dims = tl.arange(0, HEAD_PAD)[None, :]
    live = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    # 64-bit from here on: the top blocks of a full pool lie beyond 2**31 elements.
    slot = tl.load(slots_ptr + token).to(tl.int64)
    place = (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * TOKEN_STRIDE
    target = place + heads * HEAD_STRIDE + dims
    source = heads * HEAD_DIM + dims
    k = tl.load(k_ptr + token * K_ROW + source, mask=live)
    v = tl.load(v_ptr + token * V_ROW + source, mask=live)
    tl.store(k_cache_ptr + target, k, mask=live)
    tl.store(v_cache_ptr + target, v, mask=live)


def cache_strides(cache: Tensor) -> dict[str, int]:
    """Elements between blocks, tokens and heads of a view [blocks, block_size, heads, dim].

    They are compiled in: none of them depends on the number of blocks.
    """
    block, token, head, dim = cache.stride()
    if dim != 1:
        raise ValueError(f"head_dim of a cache view must be contiguous, got stride {dim}")
    return {"BLOCK_STRIDE": block, "TOKEN_STRIDE": token, "HEAD_STRIDE": head}


def store_kv(k: Tensor, v: Tensor, layer_kv: tuple[Tensor, Tensor], slots: Tensor) -> None:
    """Write k, v [num_tokens, num_kv_heads, head_dim] to ``slots`` [num_tokens] of the cache.

    Where several tokens name one slot (padding, block 0), any of them may win.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    k_cache, v_cache = layer_kv
    _store_kv_kernel[(num_tokens,)](
        k_cache, v_cache, k, v, slots,
        K_ROW=k.stride(0), V_ROW=v.stride(0), **cache_strides(k_cache),
        BLOCK_SIZE=k_cache.shape[1], NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HEADS_PAD=triton.next_power_of_2(num_kv_heads),
        HEAD_PAD=triton.next_power_of_2(head_dim), **chained(),
    )  # fmt: skip
