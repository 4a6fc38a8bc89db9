"""Decode attention, one query a row, over the block table, split along the context. CUDA, Triton.

``num_programs`` programs share the chunks of a row and kv head (``chunks``). Where one program has
them all it takes their tiles in one loop and adds chunks up as it goes. Otherwise each chunk leaves
a partial result, and the program that arrives last adds them up, in the same order and by the same
operations. So the grid can be fixed when a graph is captured: programs without a chunk leave at
once.

The key and value of this step come from registers and are stored to their slot on the way; in
decode form queries and keys may come as a product left them, and are normed and rotated here.
Before the kernel ahead of this one has ended, lengths and block ids are read, which the first
kernel of a step writes, and what nobody writes while serving.
"""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.kernels.attend_keys import (
    attend_all,
    attend_chunk,
    block_ids_of,
    no_keys,
    score_of_key,
)
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

# As few make a program take so many registers that no three share a multiprocessor while another
# has none, which made a layer of 8 rows up to 1 us slower.
_FEW_KEYS: tl.constexpr = tl.constexpr(16)


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
    MAX_CHUNKS: tl.constexpr, ALONE: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if ALONE:
        num_programs = 1
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
    block_ids = block_ids_of(table_ptr, first + tl.arange(0, TILE), end, BLOCK_SIZE)
    dims = tl.arange(0, HEAD_PAD)
    if ROTATE:
        cos, sin = load_turn(cos_sin_ptr, end, dims, HEAD_DIM)
        q_cos, q_sin = cos[None, :], sin[None, :]
        q_weight, q_partner, k_weight, k_partner = 1.0, 1.0, 1.0, 1.0
        if NORM:
            weight, partner = load_head_norm(q_weight_ptr, dims, HEAD_DIM)
            q_weight, q_partner = weight[None, :], partner[None, :]
            k_weight, k_partner = load_head_norm(k_weight_ptr, dims, HEAD_DIM)
    follow(CHAINED, NEXT_FIRST=True)
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

    first_head = row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP
    part = (first_head + heads) * MAX_CHUNKS
    workers = tl.minimum(num_programs, num_chunks)
    if ALONE:
        highest, total, acc, part_max, part_sum, part_acc = attend_all(
            q, block_ids, k_cache_ptr, v_cache_ptr, table_ptr, begin, end, chunk_len, scale_log2,
            dims, dim_ok, BLOCK_STRIDE, TOKEN_STRIDE, BLOCK_SIZE, TILE,
        )  # fmt: skip
        new_score = score_of_key(q, new_k.to(q.dtype), scale_log2, TILE)
        part_max, part_sum, part_acc = merge(
            part_max, part_sum, part_acc, new_score, 1.0, new_v.to(tl.float32)[None, :]
        )
        highest, total, acc = merge(highest, total, acc, part_max, part_sum, part_acc)
    else:
        highest, sums, acc = no_keys(GROUP_PAD, HEAD_PAD)
        total = tl.max(sums, 1)
        for chunk in range(program, num_chunks, num_programs):
            chunk_begin = begin + chunk * chunk_len
            chunk_end = tl.minimum(chunk_begin + chunk_len, end)
            part_max, part_sum, part_acc, block_ids = attend_chunk(
                q, block_ids, k_cache_ptr, v_cache_ptr, table_ptr, chunk_begin, chunk_end,
                chunk_begin + num_programs * chunk_len, end, scale_log2, dims, dim_ok,
                BLOCK_STRIDE, TOKEN_STRIDE, BLOCK_SIZE, TILE,
            )  # fmt: skip
            is_last = chunk == num_chunks - 1
            key = tl.where(is_last, new_k, 0.0).to(q.dtype)
            new_score = score_of_key(q, key, scale_log2, _FEW_KEYS)
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
    if ALONE or workers == 1:
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


def _launch(
    group_pad: int, head_pad: int, element_size: int, per_sm: int, *, is_full: bool
) -> dict[str, int]:
    """Options for ``per_sm`` rows and kv heads a multiprocessor, nearly one each if ``is_full``.

    The tile is one for all, since it shows in the sum; warps and stages do not. A multiprocessor
    has registers for eight such warps: as one to eight programs, so that all run at once.
    """
    if group_pad * head_pad > 2048 or element_size == 4:
        num_warps = 4
    else:
        num_warps = max(1, min(8 if is_full else 4, 8 // triton.next_power_of_2(per_sm)))
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
    ``metadata`` is read early: before the kernels ahead of this one there must have been one, after
    which it was written, that lets the next start only once it has waited (``chain``).

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
    # Powers of two, since the worker's warm-up meets those and no kernel may be compiled later.
    about = triton.next_power_of_2(num_rows)
    per_sm = triton.cdiv(about * num_kv_heads, workspace.num_sms)
    programs = workspace.num_programs(about, metadata.max_context_len)
    launch = _launch(
        group_pad, head_pad, q.element_size(), per_sm, is_full=workspace.is_full(about)
    )
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
        ALONE=programs == 1, ROTATE=rotation is not None, NORM=turn.weights is not None,
        **launch, **chained(),
    )  # fmt: skip
