"""The kernel of decode attention by warps on their own. Gluon, CUDA.

A context is cut into chunks, and each warp takes chunks of its own, tile by tile: what the matrix
units give it needs no other warp. Keys and values come to slots in shared memory; the first are
asked for before the kernel ahead has ended. A chunk leaves maxima, sums and weighted values, which
are added up in the order of chunks: in shared memory by the program that has them all, or by the
one of several that arrives last. So neither the batch nor the number of programs or warps shows.

Tokens of keys, and dims of values, are on the wide side of the matrix units, heads on the narrow
one. Warps are the first dim of what each of them has for itself.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from lockstep.worker.kernels import warp_share
from lockstep.worker.kernels.chain import follow
from lockstep.worker.kernels.chunks import merge
from lockstep.worker.kernels.rope import load_head_norm, load_rotated, load_turn

_TILE: gl.constexpr = gl.constexpr(warp_share.TILE)
_SOME_CHUNKS: gl.constexpr = gl.constexpr(warp_share.SOME_CHUNKS)
_LONG_CHUNK: gl.constexpr = gl.constexpr(warp_share.LONG_CHUNK)
_MAX_CHUNKS: gl.constexpr = gl.constexpr(warp_share.MAX_CHUNKS)
# Of no keys: finite, since two of them are subtracted.
_LEAST: gl.constexpr = gl.constexpr(-1e30)


@gluon.constexpr_function
def _units(warps: int) -> gl.NVMMADistributedLayout:
    """How the matrix units leave [warps, tokens or dims, heads]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def _copies(warps: int, dim: int) -> gl.BlockedLayout:
    """[warps, tokens, dims] in pieces of 16 bytes."""
    return gl.BlockedLayout([1, 1, 8], [1, 256 // dim, dim // 8], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _tokens(warps: int) -> gl.BlockedLayout:
    """[warps, tokens]."""
    return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def _heads(warps: int, dim: int) -> gl.BlockedLayout:
    """[heads, dims], a head in one warp."""
    return gl.BlockedLayout([1, dim // 32], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def _share_of(program, most_programs, begin, end):
    """What falls to this program of the tokens from ``begin`` to ``end``.

    Returns (program, programs, tokens and tiles of a chunk, first token of all); chunks; tiles.
    How a context is cut follows from its length alone. All chunks but the last are of whole tiles.
    """
    base = begin // _TILE * _TILE
    length = end - base
    chunk_len = gl.maximum(gl.minimum(gl.cdiv(length, _SOME_CHUNKS), _LONG_CHUNK), 1)
    chunk_len = gl.cdiv(gl.maximum(chunk_len, gl.cdiv(length, _MAX_CHUNKS)), _TILE) * _TILE
    num_chunks = gl.cdiv(length, chunk_len)
    # One program alone adds up in shared memory.
    is_short = num_chunks <= gl.num_warps()
    programs = gl.where(is_short, 1, gl.minimum(most_programs, num_chunks))
    chunk_tiles = chunk_len // _TILE
    num_tiles = gl.cdiv(num_chunks - program, programs * gl.num_warps()) * chunk_tiles
    return (program, programs, chunk_len, chunk_tiles, base), num_chunks, num_tiles


@gluon.jit
def _chunks_of(tile, share, warps):
    """The chunk that each of ``warps`` is at."""
    program, programs, chunk_tiles = share[0], share[1], share[3]
    return ((tile // chunk_tiles) * gl.num_warps() + warps) * programs + program


@gluon.jit
def _tokens_of(tile, share, LAYOUT: gl.constexpr):
    """[warps, tokens] of a tile."""
    chunk_len, chunk_tiles, base = share[2], share[3], share[4]
    chunks = _chunks_of(tile, share, gl.arange(0, gl.num_warps(), gl.SliceLayout(1, LAYOUT)))
    first = base + chunks * chunk_len + (tile % chunk_tiles) * _TILE
    return first[:, None] + gl.arange(0, _TILE, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _in_span(tokens, span):
    return (tokens >= span[0]) & (tokens < span[1])


@gluon.jit
def _places_of(tile, share, span, table_ptr, BLOCKS: gl.constexpr):
    """[warps, tokens] places in the cache, counted in heads; -1 of what is not in ``span``."""
    tokens = _tokens_of(tile, share, _tokens(gl.num_warps()))
    live, at = _in_span(tokens, span), tokens.to(gl.uint32)
    ids = gl.load(table_ptr + at // BLOCKS[0], mask=live, other=0, cache_modifier=".cg")
    return gl.where(live, ids * BLOCKS[1] + (at % BLOCKS[0]).to(gl.int32) * BLOCKS[2], -1)


@gluon.jit
def _ask(slot, cache_ptr, places, HEAD_DIM: gl.constexpr):
    """Have a tile copied to a slot [warps, tokens, dims]; zeros where the place is -1.

    Dead slots are never read: 0 x NaN would leak through a mask on the scores.
    """
    LAYOUT: gl.constexpr = _copies(gl.num_warps(), HEAD_DIM)
    places = gl.convert_layout(places, gl.SliceLayout(2, LAYOUT))[:, :, None]
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    source = cache_ptr + places.to(gl.int64) * HEAD_DIM + dims
    async_copy.async_copy_global_to_shared(slot, source, places >= 0)


@gluon.jit
def _load_factors(
    cos_sin_ptr, q_weight_ptr, k_weight_ptr, position, HEAD_DIM: gl.constexpr, NORM: gl.constexpr
):  # fmt: skip
    """[1, dims] each: (cosine, sine), and (weight, partner's weight) of the q and the k norm."""
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, _heads(gl.num_warps(), HEAD_DIM)))
    cos, sin = load_turn(cos_sin_ptr, position, dims, HEAD_DIM)
    q_norm, k_norm = (1.0, 1.0), (1.0, 1.0)
    if NORM:
        q_weight, q_partner = load_head_norm(q_weight_ptr, dims, HEAD_DIM)
        k_weight, k_partner = load_head_norm(k_weight_ptr, dims, HEAD_DIM)
        q_norm = (q_weight[None, :], q_partner[None, :])
        k_norm = (k_weight[None, :], k_partner[None, :])
    return (cos[None, :], sin[None, :]), q_norm, k_norm


@gluon.jit
def _load_new(
    q_ptr, k_ptr, v_ptr, factors, eps,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """This step's rotated q [heads, dims] and k, and v [1, dims], of one row and kv head."""
    LAYOUT: gl.constexpr = _heads(gl.num_warps(), HEAD_DIM)
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))[:, None]
    one = gl.arange(0, 1, gl.SliceLayout(1, LAYOUT))[:, None]
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))[None, :]
    turn, q_norm, k_norm = factors
    q = load_rotated(
        q_ptr + heads * HEAD_DIM, dims, (heads < GROUP) & (dims < HEAD_DIM), turn[0], turn[1],
        q_norm[0], q_norm[1], eps, HEAD_DIM, NORM,
    )  # fmt: skip
    k = load_rotated(
        k_ptr + one, dims, (one < 1) & (dims < HEAD_DIM), turn[0], turn[1],
        k_norm[0], k_norm[1], eps, HEAD_DIM, NORM,
    )  # fmt: skip
    return q, k, gl.load(v_ptr + one + dims)


@gluon.jit
def _store_new(cache, slot, new_k, new_v, BLOCKS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """k and v [1, dims] to the cache."""
    LAYOUT: gl.constexpr = _heads(gl.num_warps(), HEAD_DIM)
    one = gl.arange(0, 1, gl.SliceLayout(1, LAYOUT))[:, None]
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))[None, :]
    place = (slot // BLOCKS[0]) * BLOCKS[1] + (slot % BLOCKS[0]) * BLOCKS[2]
    gl.store(cache[1] + place * HEAD_DIM + one + dims, new_k)
    gl.store(cache[2] + place * HEAD_DIM + one + dims, new_v)


@gluon.jit
def _for_each_warp(q, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """q [heads, dims] as the matrix units take it: [warps, dims, heads]."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, _units(gl.num_warps()), 2)
    turned = gl.convert_layout(q.permute((1, 0)), gl.SliceLayout(0, RIGHT)).expand_dims(0)
    zeros = gl.zeros([gl.num_warps(), HEAD_DIM, HEADS], q.dtype, RIGHT)
    return gl.broadcast(turned, zeros)[0]


@gluon.jit
def _no_keys(HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """(maxima, sums [heads], weighted values [heads, dims]) of no keys."""
    LAYOUT: gl.constexpr = _heads(gl.num_warps(), HEAD_DIM)
    highest = gl.full([HEADS], _LEAST, gl.float32, gl.SliceLayout(1, LAYOUT))
    return highest, gl.zeros_like(highest), gl.zeros([HEADS, HEAD_DIM], gl.float32, LAYOUT)


@gluon.jit
def _no_keys_of_warps(HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """(maxima, sums [warps, heads], weighted values [warps, dims, heads]) of no keys."""
    UNITS: gl.constexpr = _units(gl.num_warps())
    highest = gl.full([gl.num_warps(), HEADS], _LEAST, gl.float32, gl.SliceLayout(1, UNITS))
    acc = gl.zeros([gl.num_warps(), HEAD_DIM, HEADS], gl.float32, UNITS)
    return highest, gl.zeros_like(highest), acc


@gluon.jit
def _weigh(k, q, part, live, scale_log2, HEADS: gl.constexpr):
    """Weights of a tile's keys, and ``part`` shrunk to the new maxima, with their sums."""
    UNITS: gl.constexpr = _units(gl.num_warps())
    highest, total, acc = part
    zeros = gl.zeros([gl.num_warps(), _TILE, HEADS], gl.float32, UNITS)
    scores = mma_v2(k, q, zeros) * scale_log2
    scores = gl.where(live[:, :, None], scores, float("-inf"))
    new_highest = gl.maximum(highest, gl.max(scores, 1))
    weights = gl.exp2(scores - new_highest[:, None, :])
    decay = gl.exp2(highest - new_highest)
    total = gl.fma(total, decay, gl.sum(weights, 1))
    weights = gl.convert_layout(weights.to(q.dtype), gl.DotOperandLayout(1, UNITS, 2))
    return weights, (new_highest, total, acc * decay[:, None, :])


@gluon.jit
def _merge_warps(result, part, slot, factors, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """``result`` and the chunks of all warps, in order. ``slot`` is room that is free now."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = _heads(WARPS, HEAD_DIM)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # A tile has as many bytes as 16 heads. Its dims come first, in both forms.
    ROOM: gl.constexpr = WARPS * 16 // HEADS
    STORED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 2, 0])
    LOADED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [0, 1])
    highest, total, acc = result
    stored = slot._reinterpret(gl.float32, [ROOM, HEAD_DIM, HEADS], STORED)
    stored.slice(0, WARPS, 0).store(part[2])
    factors.slice(0, WARPS, 0).store(part[0])
    factors.slice(WARPS, WARPS, 0).store(part[1])
    loaded = slot._reinterpret(gl.float32, [ROOM, HEAD_DIM, HEADS], LOADED)
    lines = factors._reinterpret(gl.float32, [2 * WARPS, HEADS], LINE)
    for warp in gl.static_range(WARPS):
        other_max = lines.index(warp).load(gl.SliceLayout(1, LAYOUT))
        other_sum = lines.index(WARPS + warp).load(gl.SliceLayout(1, LAYOUT))
        other_acc = loaded.index(warp).permute((1, 0)).load(LAYOUT)
        highest, total, acc = merge(highest, total, acc, other_max, other_sum, other_acc)
    return highest, total, acc


@gluon.jit
def _leave_parts(
    parts, part, chunks, num_chunks, first_head,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Store all warps' chunks: maxima, sums [heads, chunks], values [heads, chunks, dims]."""
    UNITS: gl.constexpr = _units(gl.num_warps())
    chunks = chunks[:, None]
    heads = gl.arange(0, HEADS, gl.SliceLayout(0, gl.SliceLayout(1, UNITS)))[None, :]
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(2, UNITS)))[None, :, None]
    used = (chunks < num_chunks) & (heads < GROUP)
    place = (first_head + heads) * _MAX_CHUNKS + chunks
    gl.store(parts[0] + place, part[0], mask=used)
    gl.store(parts[1] + place, part[1], mask=used)
    gl.store(parts[2] + place[:, None, :] * HEAD_DIM + dims, part[2], mask=used[:, None, :])


@gluon.jit
def _arrives_last(counter, programs):
    """Whether all others have left their parts, too."""
    # All threads' parts come before the one thread's release that follows.
    tl.debug_barrier()
    return gl.atomic_add(counter, 1, sem="acq_rel") == programs - 1


@gluon.jit
def _merge_parts(
    result, parts, num_chunks, first_head,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """``result`` and all chunks, in order; .cg skips a possibly stale L1."""
    LAYOUT: gl.constexpr = _heads(gl.num_warps(), HEAD_DIM)
    AT_ONCE: gl.constexpr = 2 * gl.num_warps()  # on their way together
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))[None, :]
    highest, total, acc = result
    for first in range(0, num_chunks, AT_ONCE):
        for i in gl.static_range(AT_ONCE):
            used = (first + i < num_chunks) & (heads < GROUP)
            place = (first_head + heads) * _MAX_CHUNKS + first + i
            other_max = gl.load(parts[0] + place, mask=used, other=_LEAST, cache_modifier=".cg")
            other_sum = gl.load(parts[1] + place, mask=used, other=0.0, cache_modifier=".cg")
            values = parts[2] + place[:, None] * HEAD_DIM + dims
            other_acc = gl.load(values, mask=used[:, None], other=0.0, cache_modifier=".cg")
            highest, total, acc = merge(highest, total, acc, other_max, other_sum, other_acc)
    return highest, total, acc


@gluon.jit
def _ask_first(
    room, cache, share, span, BLOCKS: gl.constexpr, HEAD_DIM: gl.constexpr, KEY_SLOTS: gl.constexpr
):  # fmt: skip
    """Fill the slots of keys, of one each that of values too: two tiles are enough at first.

    There are two groups for each slot of keys, as in ``_attend`` later on.
    """
    keys, values, _ = room
    table_ptr, k_cache_ptr, v_cache_ptr = cache
    places = _places_of(0, share, span, table_ptr, BLOCKS)
    if KEY_SLOTS == 1:
        _ask(values, v_cache_ptr, places, HEAD_DIM)
    for slot in gl.static_range(KEY_SLOTS):
        async_copy.commit_group()
        _ask(keys.index(slot), k_cache_ptr, places, HEAD_DIM)
        async_copy.commit_group()
        places = _places_of(slot + 1, share, span, table_ptr, BLOCKS)


@gluon.jit
def _attend(
    q, room, cache, share, span, parts, num_chunks, num_tiles, first_head, scale_log2,
    BLOCKS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    KEY_SLOTS: gl.constexpr,
):  # fmt: skip
    """What ``_merge_warps`` gives, or of one of several programs no keys; they leave parts.

    ``_ask_first`` has been called.
    """
    UNITS: gl.constexpr = _units(gl.num_warps())
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 2)
    keys, values, factors = room
    table_ptr, k_cache_ptr, v_cache_ptr = cache
    programs, chunk_tiles = share[1], share[3]
    warps = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(1, UNITS)))
    result = _no_keys(HEADS, HEAD_DIM)
    part = _no_keys_of_warps(HEADS, HEAD_DIM)
    # Block ids are asked for a tile ahead.
    ASKED: gl.constexpr = KEY_SLOTS == 1  # tiles of values
    v_places = _places_of(ASKED, share, span, table_ptr, BLOCKS)
    k_places = _places_of(KEY_SLOTS, share, span, table_ptr, BLOCKS)
    for tile in range(num_tiles):
        async_copy.wait_group(2 * KEY_SLOTS - 2)
        if tile >= ASKED:
            _ask(values, v_cache_ptr, v_places, HEAD_DIM)
            v_places = _places_of(tile + 1, share, span, table_ptr, BLOCKS)
        async_copy.commit_group()
        slot = keys.index(tile % KEY_SLOTS)
        live = _in_span(_tokens_of(tile, share, gl.SliceLayout(2, UNITS)), span)
        weights, part = _weigh(slot.load(LEFT), q, part, live, scale_log2, HEADS)
        async_copy.wait_group(0)
        _ask(slot, k_cache_ptr, k_places, HEAD_DIM)
        async_copy.commit_group()
        k_places = _places_of(tile + KEY_SLOTS + 1, share, span, table_ptr, BLOCKS)
        acc = mma_v2(values.permute((0, 2, 1)).load(LEFT), weights, part[2])
        part = (part[0], part[1], acc)
        if tile % chunk_tiles == chunk_tiles - 1:
            if programs == 1:
                result = _merge_warps(result, part, values, factors, HEADS, HEAD_DIM)
            else:
                chunks = _chunks_of(tile, share, warps)
                _leave_parts(parts, part, chunks, num_chunks, first_head, GROUP, HEADS, HEAD_DIM)
            part = _no_keys_of_warps(HEADS, HEAD_DIM)
    return result


@gluon.jit(do_not_specialize=["window", "table_row"])
def warp_attention_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, context_lens_ptr,
    block_table_ptr, part_max_ptr, part_sum_ptr, part_acc_ptr, arrivals_ptr, cos_sin_ptr,
    q_weight_ptr, k_weight_ptr, window, table_row, scale_log2, eps,
    Q_ROW: gl.constexpr, K_ROW: gl.constexpr, V_ROW: gl.constexpr, OUT_ROW: gl.constexpr,
    BLOCKS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, KEY_SLOTS: gl.constexpr, NORM: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """``BLOCKS``: tokens of a block; heads from block to block, token to token, head to head."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = _heads(WARPS, HEAD_DIM)
    SLOT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    FACTORS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    kv_head, row = gl.program_id(1), gl.program_id(2).to(gl.int64)
    context = gl.load(context_lens_ptr + row, cache_modifier=".cg")
    # The newest token is not in the cache yet.
    span = (gl.maximum(context - window, 0), context - 1)
    share, num_chunks, num_tiles = _share_of(gl.program_id(0), gl.num_programs(0), span[0], span[1])
    program, programs = share[0], share[1]
    if program >= programs:
        follow(CHAINED, NEXT_FIRST=True)
        return
    dtype: gl.constexpr = k_cache_ptr.dtype.element_ty
    keys = gl.allocate_shared_memory(dtype, [KEY_SLOTS, WARPS, _TILE, HEAD_DIM], SLOT)
    values = gl.allocate_shared_memory(dtype, [WARPS, _TILE, HEAD_DIM], SLOT)
    room = (keys, values, gl.allocate_shared_memory(gl.float32, [2 * WARPS, HEADS], FACTORS))
    k_cache_ptr += kv_head * (BLOCKS[3] * HEAD_DIM)
    v_cache_ptr += kv_head * (BLOCKS[3] * HEAD_DIM)
    cache = (block_table_ptr + row * table_row, k_cache_ptr, v_cache_ptr)
    _ask_first(room, cache, share, span, BLOCKS, HEAD_DIM, KEY_SLOTS)
    factors = _load_factors(cos_sin_ptr, q_weight_ptr, k_weight_ptr, span[1], HEAD_DIM, NORM)
    slot = gl.load(slots_ptr + row, cache_modifier=".cg")
    follow(CHAINED, NEXT_FIRST=True)

    q, new_k, new_v = _load_new(
        q_ptr + row * Q_ROW + kv_head * (GROUP * HEAD_DIM),
        k_ptr + row * K_ROW + kv_head * HEAD_DIM, v_ptr + row * V_ROW + kv_head * HEAD_DIM,
        factors, eps, GROUP, HEADS, HEAD_DIM, NORM,
    )  # fmt: skip
    heads = gl.arange(0, HEADS, gl.SliceLayout(1, LAYOUT))[:, None]
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))[None, :]
    if program == 0:
        _store_new(cache, slot, new_k, new_v, BLOCKS, HEAD_DIM)
    new_score = gl.sum(q.to(gl.float32) * new_k.to(gl.float32), 1) * scale_log2
    first_head = (row * NUM_KV_HEADS + kv_head) * GROUP
    parts = (part_max_ptr, part_sum_ptr, part_acc_ptr)
    highest, total, acc = _attend(
        _for_each_warp(q, HEADS, HEAD_DIM), room, cache, share, span, parts,
        num_chunks, num_tiles, first_head, scale_log2, BLOCKS, GROUP, HEADS, HEAD_DIM, KEY_SLOTS,
    )  # fmt: skip
    if programs > 1:
        counter = arrivals_ptr + row * NUM_KV_HEADS + kv_head
        if not _arrives_last(counter, programs):
            return
        gl.store(counter, 0)
        result = (highest, total, acc)
        highest, total, acc = _merge_parts(
            result, parts, num_chunks, first_head, GROUP, HEADS, HEAD_DIM
        )
    highest, total, acc = merge(highest, total, acc, new_score, 1.0, new_v.to(gl.float32))
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    place = row * OUT_ROW + (kv_head * GROUP + heads) * HEAD_DIM + dims
    gl.store(out_ptr + place, result, mask=(heads < GROUP) & (dims < HEAD_DIM))
