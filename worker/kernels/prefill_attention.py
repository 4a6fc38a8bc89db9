"""Causal attention of query chunks over the block table. CUDA, Triton.

Rows of any query length share one launch. A program takes one tile of one row's queries with all
query heads of one kv head; which row that is, it finds by itself from ``query_start_loc``, so the
grid depends on numbers of tokens and rows only and the host reads nothing back.

Most tiles of a context are seen whole by all queries of a program: they are added first, without
masks. The edges follow, tiles that the diagonal or a window's begin cuts.
"""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.kernels.chain import chained, follow
from lockstep.worker.kernels.store_kv import cache_strides

NO_WINDOW = 1 << 30
LOG2_E = 1.4426950408889634


@triton.jit
def _row_of_tile(query_start_loc_ptr, num_rows, tile, TILE_TOKENS: tl.constexpr):
    """Largest row whose first tile, query_start_loc[row] // TILE_TOKENS + row, is <= tile.

    Row ``num_rows`` stands for the padding tokens behind the last query.
    """
    low = num_rows * 0
    high = num_rows
    while low < high:
        middle = (low + high + 1) // 2
        first_tile = tl.load(query_start_loc_ptr + middle) // TILE_TOKENS + middle
        low = tl.where(first_tile <= tile, middle, low)
        high = tl.where(first_tile <= tile, high, middle - 1)
    return low


@triton.jit
def _attend_tile(
    acc, highest, total, q, k_ptr, v_ptr, table_ptr, position, q_position, kv_end, window,
    scale_log2, BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add what all lines see (or, of a tile at the EDGE, what each line sees) to their sums."""
    dims = tl.arange(0, acc.shape[1])
    loaded = dims < HEAD_DIM
    if EDGE:
        # Dead slots are never loaded: 0 x NaN would leak through a mask on the scores.
        live = position < kv_end
        block_ids = tl.load(table_ptr + position // BLOCK_SIZE, mask=live, other=0)
        k_mask = loaded[:, None] & live[None, :]
        v_mask = live[:, None] & loaded[None, :]
    else:
        block_ids = tl.load(table_ptr + position // BLOCK_SIZE)
        k_mask = loaded[:, None]
        v_mask = loaded[None, :]
    base = block_ids.to(tl.int64) * BLOCK_STRIDE + (position % BLOCK_SIZE) * TOKEN_STRIDE
    k = tl.load(k_ptr + base[None, :] + dims[:, None], mask=k_mask, other=0.0)
    v = tl.load(v_ptr + base[:, None] + dims[None, :], mask=v_mask, other=0.0)
    scores = tl.dot(q, k, input_precision="ieee")
    if EDGE:
        seen = position[None, :] <= tl.minimum(q_position, kv_end - 1)[:, None]
        seen &= position[None, :] > q_position[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
    shift = new_highest
    if EDGE:
        # A line may have seen nothing yet, and then has no maximum.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    # Scaled here, and not where the product ends, to be one instruction with the subtraction.
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    decay = tl.exp2(highest - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_highest, total


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "window", "table_row"])
def _prefill_attention_kernel(
    out_ptr, q_ptr, k_cache_ptr, v_cache_ptr, query_start_loc_ptr, context_lens_ptr,
    block_table_ptr, num_rows, num_tokens, window, table_row, scale_log2,
    Q_ROW: tl.constexpr, OUT_ROW: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    TILE_TOKENS: tl.constexpr = TILE_M // GROUP_PAD
    # The last tokens of a prompt see the most, so their programs start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of_tile(query_start_loc_ptr, num_rows, tile, TILE_TOKENS)
    is_row = row < num_rows
    begin = tl.load(query_start_loc_ptr + row)
    end = tl.load(query_start_loc_ptr + row + 1, mask=is_row, other=num_tokens)
    first = (tile - (begin // TILE_TOKENS + row)) * TILE_TOKENS
    query_len = end - begin
    if first >= query_len:
        return
    if is_row & (query_len == 1):
        return
    context = tl.load(context_lens_ptr + row, mask=is_row, other=0)

    lines = tl.arange(0, TILE_M)
    token = first + lines // GROUP_PAD
    head = lines % GROUP_PAD
    dims = tl.arange(0, HEAD_PAD)
    line_ok = (token < query_len) & (head < GROUP)
    q_mask = line_ok[:, None] & (dims < HEAD_DIM)[None, :]
    place = (begin + token).to(tl.int64)
    column = (kv_head * GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + place[:, None] * Q_ROW + column, mask=q_mask, other=0.0)

    before = context - query_len
    q_position = before + token
    kv_begin = tl.maximum(before + first - window + 1, 0)
    kv_end = tl.minimum(before + first + TILE_TOKENS, context)
    # All tokens of the tile see what lies between the last one's window and the first one.
    num_tiles = tl.cdiv(tl.maximum(kv_end - kv_begin, 0), TILE_N)
    window_begin = tl.maximum(before + first + TILE_TOKENS - window, kv_begin)
    num_before = tl.minimum(tl.cdiv(window_begin - kv_begin, TILE_N), num_tiles)
    whole_begin = kv_begin + num_before * TILE_N
    num_whole = tl.maximum(before + first + 1 - whole_begin, 0) // TILE_N

    k_ptr = k_cache_ptr + kv_head * HEAD_STRIDE
    v_ptr = v_cache_ptr + kv_head * HEAD_STRIDE
    table_ptr = block_table_ptr + row.to(tl.int64) * table_row
    highest = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, HEAD_PAD], tl.float32)
    for kv_first in range(whole_begin, whole_begin + num_whole * TILE_N, TILE_N):
        acc, highest, total = _attend_tile(
            acc, highest, total, q, k_ptr, v_ptr, table_ptr, kv_first + tl.arange(0, TILE_N),
            q_position, kv_end, window, scale_log2,
            BLOCK_STRIDE, TOKEN_STRIDE, BLOCK_SIZE, HEAD_DIM, EDGE=False,
        )  # fmt: skip
    for edge in range(num_tiles - num_whole):
        kv_first = kv_begin + (edge + tl.where(edge < num_before, 0, num_whole)) * TILE_N
        acc, highest, total = _attend_tile(
            acc, highest, total, q, k_ptr, v_ptr, table_ptr, kv_first + tl.arange(0, TILE_N),
            q_position, kv_end, window, scale_log2,
            BLOCK_STRIDE, TOKEN_STRIDE, BLOCK_SIZE, HEAD_DIM, EDGE=True,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out = out_ptr + place[:, None] * OUT_ROW + column
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=q_mask)


def _tiles(head_pad: int, group_pad: int, element_size: int) -> dict[str, int]:
    """The fastest measured on an H200 for half types and head sizes up to 128.

    Elsewhere chosen by what the compiler reports for sm_90: no spilled registers.
    """
    if element_size == 4:
        tile_m, tile_n, num_warps, num_stages = 32, 16, 8, 3
    elif head_pad > 128:
        tile_m, tile_n, num_warps, num_stages = 128, 32, 8, 3
    else:
        tile_m, tile_n, num_warps, num_stages = 128, 64, 8, 5
    return {
        "TILE_M": max(tile_m, group_pad),
        "TILE_N": tile_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def prefill_attention(
    q: Tensor,
    layer_kv: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """Attention of q [num_tokens, num_heads, head_dim] into ``out``, of the same shape.

    For rows of two queries or more, whose keys and values must already be in the cache. Rows of
    one query are left to decode attention, which splits their context; tokens behind the last
    row give zeros. ``scale`` must be above 0.
    """
    num_tokens, num_heads, head_dim = q.shape
    k_cache, v_cache = layer_kv
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_rows = metadata.context_lens.shape[0]
    group = num_heads // num_kv_heads
    group_pad = triton.next_power_of_2(group)
    head_pad = max(16, triton.next_power_of_2(head_dim))
    tiles = _tiles(head_pad, group_pad, q.element_size())
    grid = (num_tokens // (tiles["TILE_M"] // group_pad) + num_rows + 1, num_kv_heads)
    _prefill_attention_kernel[grid](
        out, q, k_cache, v_cache, metadata.query_start_loc, metadata.context_lens,
        metadata.block_table, num_rows, num_tokens, window or NO_WINDOW,
        metadata.block_table.stride(0), scale * LOG2_E,
        Q_ROW=q.stride(0), OUT_ROW=out.stride(0), **cache_strides(k_cache),
        BLOCK_SIZE=block_size, GROUP=group, GROUP_PAD=group_pad,
        HEAD_DIM=head_dim, HEAD_PAD=head_pad, **tiles, **chained(),
    )  # fmt: skip
