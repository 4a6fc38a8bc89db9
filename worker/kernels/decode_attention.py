"""Decode attention, one query a row, over the block table, split along the context. CUDA, Triton.

``num_programs`` programs share the chunks of a row and kv head (``chunks``). Where one program has
them all it adds them up as it goes. Otherwise each chunk leaves a partial result, and the program
that arrives last adds them up, in the same order and by the same operations. So the grid can be
fixed when a graph is captured: programs without a chunk leave at once.

The key and value of this step come from registers and are stored to their slot on the way; in
decode form queries and keys may come as a product left them, and are normed and rotated here.
Before the kernel ahead of this one has ended, lengths and block ids are read, which the first
kernel of a step writes, and what nobody writes while serving.
"""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.kernels.chain import chained, follow
from lockstep.worker.kernels.chunks import (
    DecodeWorkspace,
    chunk_length,
    cutting,
    merge,
    merge_chunks,
)
from lockstep.worker.kernels.prefill_attention import LOG2_E, NO_WINDOW
from lockstep.worker.kernels.rope import load_head_norm, load_rotated, load_turn
from lockstep.worker.kernels.store_kv import cache_strides
from lockstep.worker.rotation import Rotation

# Columns of a dot that stands for a sum; keys of one that stands for one key's.
_SUM_COLUMNS: tl.constexpr = tl.constexpr(8)
_NUM_KEYS: tl.constexpr = tl.constexpr(16)


@triton.jit
def _block_ids(table_ptr, position, end, BLOCK_SIZE: tl.constexpr):
    place = table_ptr + position.to(tl.uint32) // BLOCK_SIZE
    return tl.load(place, mask=position < end, other=0, cache_modifier=".cg")


@triton.jit
def _places(
    block_ids, position,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Where in the cache the tokens at ``position`` are, in elements."""
    offset = position.to(tl.uint32) % BLOCK_SIZE
    return block_ids.to(tl.int64) * BLOCK_STRIDE + offset * TOKEN_STRIDE


@triton.jit
def _score_of_key(q, key):
    """q [heads, dims] times key [dims], in an order that does not follow from the batch."""
    if q.dtype == tl.float32:
        # All batches of float32 have as many warps.
        score = tl.sum(q * key[None, :], 1)
    else:
        index = tl.arange(0, _NUM_KEYS)
        keys = tl.where((index == 0)[:, None], key[None, :], 0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys))
        score = tl.sum(tl.where((index == 0)[None, :], scores, 0.0), 1)
    return score


@triton.jit
def _attend_chunk(
    q, ones, block_ids, k_cache_ptr, v_cache_ptr, table_ptr, chunk_begin, chunk_end,
    next_chunk, end, scale_log2, dims, dim_ok,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """(maxima, sums [heads], weighted values [heads, dims]) of the cached keys of a chunk.

    ``block_ids`` are of its first tile; last come those of the first tile at ``next_chunk``.
    """
    tile = tl.arange(0, TILE)
    part_max = tl.full([q.shape[0]], float("-inf"), tl.float32)
    part_sums = tl.zeros([q.shape[0], _SUM_COLUMNS], tl.float32)
    part_acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32)
    for tile_begin in range(chunk_begin, chunk_end, TILE):
        position = tile_begin + tile
        # Dead slots are never loaded: 0 x NaN would leak through a mask on the scores.
        live = position < chunk_end
        places = _places(block_ids, position, BLOCK_STRIDE, TOKEN_STRIDE, BLOCK_SIZE)
        places = places[:, None] + dims[None, :]
        next_begin = tl.where(tile_begin + TILE < chunk_end, tile_begin + TILE, next_chunk)
        block_ids = _block_ids(table_ptr, next_begin + tile, end, BLOCK_SIZE)
        tile_mask = live[:, None] & dim_ok[None, :]
        k = tl.load(k_cache_ptr + places, mask=tile_mask, other=0.0)
        v = tl.load(v_cache_ptr + places, mask=tile_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_max = tl.maximum(part_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None]).to(v.dtype)
        decay = tl.exp2(part_max - new_max)[:, None]
        part_sums = tl.dot(weights, ones, part_sums * decay, input_precision="ieee")
        part_acc = tl.dot(weights, v, part_acc * decay, input_precision="ieee")
        part_max = new_max
    return part_max, tl.max(part_sums, 1), part_acc, block_ids


@triton.jit(do_not_specialize=["window", "table_row"])
def _decode_attention_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, query_start_loc_ptr,
    context_lens_ptr, block_table_ptr, part_acc_ptr, part_max_ptr, part_sum_ptr, arrivals_ptr,
    cos_sin_ptr, q_weight_ptr, k_weight_ptr, window, table_row, scale_log2, eps,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, OUT_ROW: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr, SHORT: tl.constexpr, SHORT_CHUNK: tl.constexpr, MIN_CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context = tl.load(context_lens_ptr + row, cache_modifier=".cg")
    begin = tl.maximum(context - window, 0)
    chunk_len = chunk_length(context - begin, TILE, SHORT, SHORT_CHUNK, MIN_CHUNK, MAX_CHUNKS)
    num_chunks = tl.cdiv(context - begin, chunk_len)
    token = row
    if not ROTATE:
        token = tl.load(query_start_loc_ptr + row, cache_modifier=".cg").to(tl.int64)
        next_token = tl.load(query_start_loc_ptr + row + 1, cache_modifier=".cg")
        num_chunks = tl.where(next_token == token + 1, num_chunks, 0)
    # The newest token is not in the cache yet.
    end = context - 1
    first = begin + program * chunk_len
    table_ptr = block_table_ptr + row * table_row
    k_cache_ptr += kv_head * HEAD_STRIDE
    v_cache_ptr += kv_head * HEAD_STRIDE
    # The ids of a tile's blocks are always asked for a tile ahead.
    tile = tl.arange(0, TILE)
    block_ids = _block_ids(table_ptr, first + tile, end, BLOCK_SIZE)
    dims = tl.arange(0, HEAD_PAD)
    if ROTATE:
        cos, sin = load_turn(cos_sin_ptr, end, dims, HEAD_DIM)
        q_cos, q_sin = cos[None, :], sin[None, :]
        q_weight, q_partner, k_weight, k_partner = 1.0, 1.0, 1.0, 1.0
        if NORM:
            weight, partner = load_head_norm(q_weight_ptr, dims, HEAD_DIM)
            q_weight, q_partner = weight[None, :], partner[None, :]
            k_weight, k_partner = load_head_norm(k_weight_ptr, dims, HEAD_DIM)
    follow(CHAINED)
    if program >= num_chunks:
        return

    heads = tl.arange(0, GROUP_PAD)
    dim_ok = dims < HEAD_DIM
    head_ok = heads < GROUP
    mask = head_ok[:, None] & dim_ok[None, :]
    head_column = (kv_head * GROUP + heads)[:, None] * HEAD_DIM
    q_heads = q_ptr + token * Q_ROW + head_column
    k_head = k_ptr + token * K_ROW + kv_head * HEAD_DIM
    # The program with the last chunk owns the new token.
    newest = dim_ok & (program == (num_chunks - 1) % num_programs)
    if ROTATE:
        q = load_rotated(
            q_heads, dims[None, :], mask, q_cos, q_sin, q_weight, q_partner, eps, HEAD_DIM, NORM
        )
        new_k = load_rotated(
            k_head, dims, newest, cos, sin, k_weight, k_partner, eps, HEAD_DIM, NORM
        )
    else:
        q = tl.load(q_heads + dims[None, :], mask=mask, other=0.0)
        new_k = tl.load(k_head + dims, mask=newest, other=0.0)
    new_v = tl.load(v_ptr + token * V_ROW + kv_head * HEAD_DIM + dims, mask=newest, other=0.0)

    # A sum of weights is a dot: its order does not follow from the number of warps.
    ones = tl.full([TILE, _SUM_COLUMNS], 1.0, q.dtype)
    first_head = row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP
    part = (first_head + heads) * MAX_CHUNKS
    workers = tl.minimum(num_programs, num_chunks)
    highest = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for chunk in range(program, num_chunks, num_programs):
        chunk_begin = begin + chunk * chunk_len
        chunk_end = tl.minimum(chunk_begin + chunk_len, end)
        part_max, part_sum, part_acc, block_ids = _attend_chunk(
            q, ones, block_ids, k_cache_ptr, v_cache_ptr, table_ptr, chunk_begin, chunk_end,
            chunk_begin + num_programs * chunk_len, end, scale_log2, dims, dim_ok,
            BLOCK_STRIDE, TOKEN_STRIDE, BLOCK_SIZE, TILE,
        )  # fmt: skip
        is_last = chunk == num_chunks - 1
        new_score = _score_of_key(q, tl.where(is_last, new_k, 0.0).to(q.dtype)) * scale_log2
        new_score = tl.where(is_last, new_score, float("-inf"))
        part_max, part_sum, part_acc = merge(
            part_max, part_sum, part_acc, new_score, 1.0, new_v.to(tl.float32)[None, :]
        )
        if workers == 1:
            highest, total, acc = merge(highest, total, acc, part_max, part_sum, part_acc)
        else:
            tl.store(part_max_ptr + part + chunk, part_max, mask=head_ok)
            tl.store(part_sum_ptr + part + chunk, part_sum, mask=head_ok)
            place = part_acc_ptr + (part + chunk)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(place, part_acc, mask=mask)

    slot = tl.load(slots_ptr + token)
    new_place = (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * TOKEN_STRIDE
    tl.store(k_cache_ptr + new_place + dims, new_k, mask=newest)
    tl.store(v_cache_ptr + new_place + dims, new_v, mask=newest)
    if workers == 1:
        result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        out_heads = out_ptr + token * OUT_ROW + head_column
        tl.store(out_heads + dims[None, :], result, mask=mask)
    else:
        # All threads' partial results come before the one thread's release below.
        tl.debug_barrier()
        counter = arrivals_ptr + row * NUM_KV_HEADS + kv_head
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == workers - 1:
            tl.store(counter, 0)
            merge_chunks(
                out_ptr + token * OUT_ROW + kv_head * GROUP * HEAD_DIM,
                part_acc_ptr + first_head * MAX_CHUNKS * HEAD_DIM,
                part_max_ptr + first_head * MAX_CHUNKS,
                part_sum_ptr + first_head * MAX_CHUNKS,
                num_chunks, GROUP, HEADS, HEAD_DIM, HEAD_PAD, MAX_CHUNKS,
            )  # fmt: skip


def _launch(group_pad: int, head_pad: int, element_size: int, per_sm: int) -> dict[str, int]:
    """Options for ``per_sm`` rows and kv heads a multiprocessor.

    The tile is one for all, since it shows in the sum; warps and stages do not. A multiprocessor
    has registers for eight such warps: as two, four or eight programs, so that all run at once.
    """
    if group_pad * head_pad > 2048 or element_size == 4:
        num_warps = 4
    else:
        num_warps = max(1, min(4, 8 // triton.next_power_of_2(per_sm)))
    return {"TILE": 32, "num_warps": num_warps, "num_stages": 2 if num_warps == 1 else 3}


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_kv: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    workspace: DecodeWorkspace,
    *,
    scale: float,
    window: int | None,
    rotation: Rotation | None = None,
    out: Tensor,
) -> None:
    """Store k, v [num_tokens, num_kv_heads, head_dim], attend q [num_tokens, num_heads, head_dim].

    Only for rows of one query; other rows' tokens are left alone. In decode form that is every
    row. A row's key and value enter the attention from ``k`` and ``v``, not from the cache.
    ``metadata`` must have been written before the kernel ahead of this one: it is read early.

    Args:
        rotation: in decode form alone: what q and k still have to go through, to the position
            ``context_lens - 1``. The cache gets the rotated key. They themselves stay as they are:
            in decode form nobody reads them but this kernel.

    Raises:
        ValueError: more rows than the workspace holds, or a rotation of a batch in another form.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_rows, k_cache = metadata.context_lens.shape[0], layer_kv[0]
    workspace.check(num_rows)
    if rotation is not None and not metadata.is_decode(num_tokens):
        raise ValueError(f"rotation needs one token a row, got {num_tokens} and {num_rows} rows")
    # Without one its tensors are not looked at.
    turn = rotation or Rotation(q, None, 0.0)
    q_weight, k_weight = turn.weights or (q, k)
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    group_pad = max(16, triton.next_power_of_2(group))
    head_pad = max(16, triton.next_power_of_2(head_dim))
    per_sm = triton.cdiv(num_rows * num_kv_heads, workspace.num_sms)
    programs = workspace.num_programs(num_rows, metadata.max_context_len)
    _decode_attention_kernel[(programs, num_kv_heads, num_rows)](
        out, q, k, v, *layer_kv, metadata.slots, metadata.query_start_loc,
        metadata.context_lens, metadata.block_table,
        workspace.partial_acc, workspace.partial_max, workspace.partial_sum, workspace.arrivals,
        turn.cos_sin, q_weight, k_weight,
        window or NO_WINDOW, metadata.block_table.stride(0), scale * LOG2_E, turn.eps,
        Q_ROW=q.stride(0), K_ROW=k.stride(0), V_ROW=v.stride(0), OUT_ROW=out.stride(0),
        **cache_strides(k_cache), BLOCK_SIZE=k_cache.shape[1], NUM_KV_HEADS=num_kv_heads,
        GROUP=group, GROUP_PAD=group_pad, HEADS=triton.next_power_of_2(group),
        HEAD_DIM=head_dim, HEAD_PAD=head_pad, **cutting(num_kv_heads),
        ROTATE=rotation is not None, NORM=turn.weights is not None,
        **_launch(group_pad, head_pad, q.element_size(), per_sm), **chained(),
    )  # fmt: skip
