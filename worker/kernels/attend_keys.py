"""Attention of a row's query to keys in the cache, tile by tile. Triton.

A chunk's tiles are taken one after another, so what a chunk gives is the same wherever it is done.
"""

import triton
import triton.language as tl

from lockstep.worker.kernels.chunks import merge

# Columns of a dot that stands for a sum.
SUM_COLUMNS: tl.constexpr = tl.constexpr(8)


@triton.jit
def block_ids_of(table_ptr, position, end, BLOCK_SIZE: tl.constexpr):
    """Of the tokens at ``position`` before ``end``; always asked for a tile ahead."""
    place = table_ptr + position.to(tl.uint32) // BLOCK_SIZE
    return tl.load(place, mask=position < end, other=0, cache_modifier=".cg")


@triton.jit
def score_of_key(q, key, scale, NUM_KEYS: tl.constexpr):
    """q [heads, dims] times key [dims] and ``scale``, in an order that no batch decides.

    It is one of ``NUM_KEYS`` scores: with as many as a tile has, all scores lie alike.
    """
    if q.dtype == tl.float32:
        # All batches of float32 have as many warps.
        score = tl.sum(q * key[None, :], 1)
    else:
        index = tl.arange(0, NUM_KEYS)
        keys = tl.where((index == 0)[:, None], key[None, :], 0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys))
        score = tl.sum(tl.where((index == 0)[None, :], scores, 0.0), 1)
    # Rounded here: the compiler might fuse a product with what some callers do next.
    return tl.fma(score, scale, 0.0)


@triton.jit
def no_keys(HEADS: tl.constexpr, DIMS: tl.constexpr):
    """(maxima [heads], sums [heads, columns], weighted values [heads, dims]) of no keys."""
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    return highest, tl.zeros([HEADS, SUM_COLUMNS], tl.float32), tl.zeros([HEADS, DIMS], tl.float32)


@triton.jit
def _attend_tile(
    q, ones, part_max, part_sums, part_acc, block_ids, position, live, k_cache_ptr, v_cache_ptr,
    scale_log2, dims, dim_ok,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """(maxima, sums, weighted values) of a chunk's keys so far and of those at ``position``."""
    offset = position.to(tl.uint32) % BLOCK_SIZE
    places = block_ids.to(tl.int64) * BLOCK_STRIDE + offset * TOKEN_STRIDE
    places = places[:, None] + dims[None, :]
    # Dead slots are never loaded: 0 x NaN would leak through a mask on the scores.
    mask = live[:, None] & dim_ok[None, :]
    k = tl.load(k_cache_ptr + places, mask=mask, other=0.0)
    v = tl.load(v_cache_ptr + places, mask=mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    scores = tl.where(live[None, :], scores, float("-inf"))
    new_max = tl.maximum(part_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None]).to(v.dtype)
    decay = tl.exp2(part_max - new_max)[:, None]
    # A sum of weights is a dot: its order does not follow from the number of warps.
    part_sums = tl.dot(weights, ones, part_sums * decay, input_precision="ieee")
    part_acc = tl.dot(weights, v, part_acc * decay, input_precision="ieee")
    return new_max, part_sums, part_acc


@triton.jit
def attend_chunk(
    q, block_ids, k_cache_ptr, v_cache_ptr, table_ptr, chunk_begin, chunk_end, next_chunk, end,
    scale_log2, dims, dim_ok,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """(maxima, sums [heads], weighted values [heads, dims]) of the cached keys of a chunk.

    ``block_ids`` are of its first tile; last come those of the first tile at ``next_chunk``.
    """
    tile = tl.arange(0, TILE)
    ones = tl.full([TILE, SUM_COLUMNS], 1.0, q.dtype)
    part_max, part_sums, part_acc = no_keys(q.shape[0], q.shape[1])
    for tile_begin in range(chunk_begin, chunk_end, TILE):
        position = tile_begin + tile
        ids = block_ids
        next_begin = tl.where(tile_begin + TILE < chunk_end, tile_begin + TILE, next_chunk)
        block_ids = block_ids_of(table_ptr, next_begin + tile, end, BLOCK_SIZE)
        part_max, part_sums, part_acc = _attend_tile(
            q, ones, part_max, part_sums, part_acc, ids, position, position < chunk_end,
            k_cache_ptr, v_cache_ptr, scale_log2, dims, dim_ok,
            BLOCK_STRIDE, TOKEN_STRIDE, BLOCK_SIZE,
        )  # fmt: skip
    return part_max, tl.max(part_sums, 1), part_acc, block_ids


@triton.jit
def attend_all(
    q, block_ids, k_cache_ptr, v_cache_ptr, table_ptr, begin, end, chunk_len, scale_log2, dims,
    dim_ok,
    BLOCK_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Of all chunks but the last, merged; then of the last one's cached keys, as ``attend_chunk``.

    In one loop over all tiles, so that loads run on where a chunk ends.
    """
    tile = tl.arange(0, TILE)
    ones = tl.full([TILE, SUM_COLUMNS], 1.0, q.dtype)
    part_max, part_sums, part_acc = no_keys(q.shape[0], q.shape[1])
    highest, sums, acc = no_keys(q.shape[0], q.shape[1])
    total = tl.max(sums, 1)
    chunk_end = begin + chunk_len
    for tile_begin in range(begin, end, TILE):
        position = tile_begin + tile
        ids = block_ids
        block_ids = block_ids_of(table_ptr, position + TILE, end, BLOCK_SIZE)
        part_max, part_sums, part_acc = _attend_tile(
            q, ones, part_max, part_sums, part_acc, ids, position, position < end,
            k_cache_ptr, v_cache_ptr, scale_log2, dims, dim_ok,
            BLOCK_STRIDE, TOKEN_STRIDE, BLOCK_SIZE,
        )  # fmt: skip
        # The newest token, at ``end``, is in a later chunk than this one.
        if (tile_begin + TILE == chunk_end) & (chunk_end <= end):
            part_sum = tl.max(part_sums, 1)
            highest, total, acc = merge(highest, total, acc, part_max, part_sum, part_acc)
            part_max, part_sums, part_acc = no_keys(q.shape[0], q.shape[1])
            chunk_end += chunk_len
    return highest, total, acc, part_max, tl.max(part_sums, 1), part_acc
