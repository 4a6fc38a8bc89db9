"""Decode attention, one query a row, over the block table, split along the context. CUDA, Triton.

A context is cut into chunks by its own length alone. ``num_programs`` programs share the chunks of
a row and kv head, each chunk leaves its own partial result, and the program that arrives last adds
them up in order. So the answer depends neither on the number of programs nor on the batch, and the
grid can be fixed when a graph is captured: programs without a chunk leave at once.

The key and value of this step come from registers and are stored to their slot on the way.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.kernels.chain import chained, follow
from lockstep.worker.kernels.prefill_attention import LOG2_E, NO_WINDOW
from lockstep.worker.kernels.store_kv import cache_strides

_MIN_CHUNK = 128
_PROGRAMS_PER_SM = 4
_MANY_ROWS = 16


@triton.jit
def _add_up_chunks(
    out_ptr, part_acc_ptr, part_max_ptr, part_sum_ptr, num_chunks,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Pointers are those of the first head of the group; .cg skips a possibly stale L1."""
    chunks = tl.arange(0, MAX_CHUNKS)
    dims = tl.arange(0, HEAD_PAD)
    used = chunks < num_chunks
    mask = used[:, None] & (dims < HEAD_DIM)[None, :]
    for head in tl.static_range(GROUP):
        places = head * MAX_CHUNKS + chunks
        highs = tl.load(part_max_ptr + places, mask=used, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(part_sum_ptr + places, mask=used, other=0.0, cache_modifier=".cg")
        accs = tl.load(
            part_acc_ptr + places[:, None] * HEAD_DIM + dims[None, :],
            mask=mask, other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        shares = tl.exp2(highs - tl.max(highs, 0))
        total = tl.sum(sums * shares, 0)
        result = tl.sum(accs * shares[:, None], 0) / total
        out = out_ptr + head * HEAD_DIM + dims
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["window", "table_row"])
def _decode_attention_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, query_start_loc_ptr,
    context_lens_ptr, block_table_ptr, part_acc_ptr, part_max_ptr, part_sum_ptr, arrivals_ptr,
    window, table_row, scale_log2,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, OUT_ROW: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr, MIN_CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr,
    TOKEN_IS_ROW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    token = row
    if not TOKEN_IS_ROW:
        token = tl.load(query_start_loc_ptr + row).to(tl.int64)
        if tl.load(query_start_loc_ptr + row + 1) != token + 1:
            return
    context = tl.load(context_lens_ptr + row)
    begin = tl.maximum(context - window, 0)
    chunk_len = tl.cdiv(tl.cdiv(context - begin, MAX_CHUNKS), TILE) * TILE
    chunk_len = tl.maximum(chunk_len, MIN_CHUNK)
    num_chunks = tl.cdiv(context - begin, chunk_len)
    if program >= num_chunks:
        return

    heads = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_PAD)
    dim_ok = dims < HEAD_DIM
    head_ok = heads < GROUP
    mask = head_ok[:, None] & dim_ok[None, :]
    column = (kv_head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + token * Q_ROW + column, mask=mask, other=0.0)

    # The program with the last chunk owns the new token.
    newest = dim_ok & (program == (num_chunks - 1) % num_programs)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    new_place = (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * TOKEN_STRIDE
    new_place += kv_head * HEAD_STRIDE
    source = kv_head * HEAD_DIM + dims
    new_k = tl.load(k_ptr + token * K_ROW + source, mask=newest, other=0.0)
    new_v = tl.load(v_ptr + token * V_ROW + source, mask=newest, other=0.0)
    tl.store(k_cache_ptr + new_place + dims, new_k, mask=newest)
    tl.store(v_cache_ptr + new_place + dims, new_v, mask=newest)
    products = q.to(tl.float32) * new_k.to(tl.float32)[None, :]
    new_score = tl.sum(products, 1) * scale_log2
    new_value = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32) + new_v.to(tl.float32)[None, :]

    first_head = row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP
    part = (first_head + heads) * MAX_CHUNKS
    for chunk in range(program, num_chunks, num_programs):
        chunk_begin = begin + chunk * chunk_len
        chunk_end = tl.minimum(chunk_begin + chunk_len, context - 1)
        is_last = chunk == num_chunks - 1
        highest = tl.where(is_last, new_score, float("-inf"))
        total = tl.where(is_last, 1.0, tl.zeros([GROUP_PAD], tl.float32))
        acc = tl.where(is_last, new_value, 0.0)
        for tile_begin in range(chunk_begin, chunk_end, TILE):
            position = tile_begin + tl.arange(0, TILE)
            # Dead slots are never loaded: 0 x NaN would leak through a mask on the scores.
            live = position < chunk_end
            block_ids = tl.load(
                block_table_ptr + row * table_row + position // BLOCK_SIZE, mask=live, other=0
            ).to(tl.int64)  # fmt: skip
            base = block_ids * BLOCK_STRIDE + (position % BLOCK_SIZE) * TOKEN_STRIDE
            base += kv_head * HEAD_STRIDE
            k_mask = dim_ok[:, None] & live[None, :]
            k = tl.load(k_cache_ptr + base[None, :] + dims[:, None], mask=k_mask, other=0.0)
            v_mask = live[:, None] & dim_ok[None, :]
            v = tl.load(v_cache_ptr + base[:, None] + dims[None, :], mask=v_mask, other=0.0)
            scores = tl.dot(q, k, input_precision="ieee") * scale_log2
            scores = tl.where(live[None, :], scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_highest[:, None])
            decay = tl.exp2(highest - new_highest)
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
            highest = new_highest
        alone = mask & (num_chunks == 1)
        result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * OUT_ROW + column, result, mask=alone)
        shared = head_ok & (num_chunks > 1)
        tl.store(part_max_ptr + part + chunk, highest, mask=shared)
        tl.store(part_sum_ptr + part + chunk, total, mask=shared)
        part_acc = part_acc_ptr + (part + chunk)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(part_acc, acc, mask=mask & (num_chunks > 1))

    if num_chunks > 1:
        # All threads' partial results come before the one thread's release below.
        tl.debug_barrier()
        counter = arrivals_ptr + row * NUM_KV_HEADS + kv_head
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == tl.minimum(num_programs, num_chunks) - 1:
            tl.store(counter, 0)
            _add_up_chunks(
                out_ptr + token * OUT_ROW + kv_head * GROUP * HEAD_DIM,
                part_acc_ptr + first_head * MAX_CHUNKS * HEAD_DIM,
                part_max_ptr + first_head * MAX_CHUNKS,
                part_sum_ptr + first_head * MAX_CHUNKS,
                num_chunks, GROUP, HEAD_DIM, HEAD_PAD, MAX_CHUNKS,
            )  # fmt: skip


def max_chunks(num_kv_heads: int) -> int:
    """Most chunks of a context: enough for one row to fill the device, whatever the kv heads."""
    wanted: int = triton.next_power_of_2(256 // num_kv_heads)
    return min(64, max(8, wanted))


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Partial results of at most ``max_rows`` rows; allocated once, before any capture.

    ``arrivals`` is all zero between launches: the last program of a row and head resets its count.
    """

    partial_acc: Tensor  # [max_rows, num_heads, max_chunks, head_dim] float32
    partial_max: Tensor  # [max_rows, num_heads, max_chunks] float32, in units of log2
    partial_sum: Tensor  # [max_rows, num_heads, max_chunks] float32
    arrivals: Tensor  # [max_rows, num_kv_heads] int32
    num_sms: int

    @staticmethod
    def create(
        max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> "DecodeWorkspace":
        shape = (max_rows, num_heads, max_chunks(num_kv_heads))
        return DecodeWorkspace(
            partial_acc=torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            partial_max=torch.empty(shape, dtype=torch.float32, device=device),
            partial_sum=torch.empty(shape, dtype=torch.float32, device=device),
            arrivals=torch.zeros((max_rows, num_kv_heads), dtype=torch.int32, device=device),
            num_sms=_num_sms(device),
        )

    def num_programs(self, num_rows: int, max_context_len: int) -> int:
        """Programs a row and kv head; a choice of speed alone, no result depends on it."""
        num_kv_heads = self.arrivals.shape[1]
        most = min(max_chunks(num_kv_heads), -(-max_context_len // _MIN_CHUNK))
        wanted = -(-_PROGRAMS_PER_SM * self.num_sms // (num_rows * num_kv_heads))
        return max(1, min(most, wanted))

    def check(self, num_rows: int) -> None:
        limit = self.arrivals.shape[0]
        if num_rows > limit:
            raise ValueError(f"num_rows must be at most {limit} (workspace), got {num_rows}")


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _tile(head_pad: int, element_size: int, num_rows: int) -> dict[str, int]:
    """The tile follows from the cache alone, since it shows in the sum; the stages do not.

    Five stages keep two tiles in flight, as the first two go into the block table. Many rows keep
    the device busier the other way: two stages, and twice the programs on a multiprocessor.
    """
    if head_pad > 128:
        return {"TILE": 32, "num_stages": 3}
    return {
        "TILE": 32 if element_size == 4 else 64,
        "num_stages": 5 if num_rows < _MANY_ROWS else 2,
    }


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
    out: Tensor,
) -> None:
    """Store k, v [num_tokens, num_kv_heads, head_dim], attend q [num_tokens, num_heads, head_dim].

    Only for rows of one query; other rows' tokens are left alone. In decode form that is every
    row. A row's key and value enter the attention from ``k`` and ``v``, not from the cache.

    Raises:
        ValueError: more rows than the workspace holds.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_rows, k_cache = metadata.context_lens.shape[0], layer_kv[0]
    workspace.check(num_rows)
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    head_pad = max(16, triton.next_power_of_2(head_dim))
    programs = workspace.num_programs(num_rows, metadata.max_context_len)
    _decode_attention_kernel[(programs, num_kv_heads, num_rows)](
        out, q, k, v, *layer_kv, metadata.slots, metadata.query_start_loc,
        metadata.context_lens, metadata.block_table,
        workspace.partial_acc, workspace.partial_max, workspace.partial_sum, workspace.arrivals,
        window or NO_WINDOW, metadata.block_table.stride(0), scale * LOG2_E,
        Q_ROW=q.stride(0), K_ROW=k.stride(0), V_ROW=v.stride(0), OUT_ROW=out.stride(0),
        **cache_strides(k_cache), BLOCK_SIZE=k_cache.shape[1], NUM_KV_HEADS=num_kv_heads,
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, HEAD_PAD=head_pad, MIN_CHUNK=_MIN_CHUNK,
        MAX_CHUNKS=max_chunks(num_kv_heads), TOKEN_IS_ROW=metadata.is_decode(num_tokens),
        num_warps=4, **_tile(head_pad, q.element_size(), num_rows), **chained(),
    )  # fmt: skip
