"""Draw among the tokens that min_p, top_k and top_p keep, without sorting. CUDA, Triton.

Four kernels: the best of every split of a row; a lower bound of what can be kept, from those; a
list of the tokens that reach the bound, mostly short; then, by one program a row, the exact cut by
bisection over that list (or over the row, if the list is too short for it) and the noisy draw.

Counts and masses are integers, so that nothing depends on the order in which the list was filled.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.kernels.sample import BLOCK, best_of, noisy_scores
from lockstep.worker.sampling_state import LaneSampling

LIST_CAPACITY = 8192
_CHUNK = 2048
_WAYS = 8


@triton.jit
def _ordered(values):
    """Integers in the order of the floats."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _mass(logits, best, temperature):
    """Probability in units of 2**-34 of the best token, as in ``worker.filters``."""
    weight = tl.exp((logits - best) / temperature)
    return (weight.to(tl.float64) * 17179869184.0).to(tl.int64)


@triton.jit
def _filters(floats_ptr, ints_ptr, row, FLOATS_ROW: tl.constexpr, INTS_ROW: tl.constexpr):
    """temperature, top_p, min_p, top_k of a lane: neighbours in its two rows."""
    floats, ints = floats_ptr + row * FLOATS_ROW, ints_ptr + row * INTS_ROW
    return tl.load(floats), tl.load(floats + 1), tl.load(floats + 2), tl.load(ints + 3)


@triton.jit
def _cuts(top_p, min_p, top_k, VOCAB: tl.constexpr):
    return (top_p < 1) | (min_p > 0) | (top_k < VOCAB)


@triton.jit
def _splits_kernel(
    score_ptr, id_ptr, logits_ptr, floats_ptr, ints_ptr, COUNT: tl.constexpr, VOCAB: tl.constexpr,
    FLOATS_ROW: tl.constexpr, INTS_ROW: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = split * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * COUNT + columns, mask=columns < COUNT, other=float("-inf"))
    temperature, top_p, min_p, top_k = _filters(floats_ptr, ints_ptr, row, FLOATS_ROW, INTS_ROW)
    # A row to be cut is drawn from later; until then its best logits are wanted, without noise.
    temperature = tl.where(_cuts(top_p, min_p, top_k, VOCAB), 0.0, temperature)
    seed, position = tl.load(ints_ptr + row * INTS_ROW), tl.load(ints_ptr + row * INTS_ROW + 1)
    best, index = best_of(noisy_scores(logits, columns, seed, position, temperature))
    tl.store(score_ptr + row * NUM_SPLITS + split, best)
    tl.store(id_ptr + row * NUM_SPLITS + split, split * BLOCK + index)


@triton.jit
def _bounds_kernel(
    best_ptr, floor_ptr, bound_ptr, length_ptr, total_ptr, score_ptr, floats_ptr, ints_ptr,
    COUNT: tl.constexpr, VOCAB: tl.constexpr, FLOATS_ROW: tl.constexpr, INTS_ROW: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, PADDED_SPLITS)
    live = splits < NUM_SPLITS
    scores = tl.load(score_ptr + row * NUM_SPLITS + splits, mask=live, other=float("-inf"))
    best = tl.max(scores, 0)
    temperature, top_p, min_p, top_k = _filters(floats_ptr, ints_ptr, row, FLOATS_ROW, INTS_ROW)
    floor = tl.full((), float("-inf"), tl.float32)
    if min_p > 0:
        floor = best + temperature * tl.log(min_p)
    bound = floor
    if top_k < VOCAB:
        if top_k <= NUM_SPLITS:
            # k splits have a token as good as the k-th best of them, so k tokens are.
            ordered = tl.sort(scores, descending=True)
            kth = tl.max(tl.where(splits == top_k - 1, ordered, float("-inf")), 0)
            bound = tl.maximum(floor, kth)
    elif top_p < 1:
        # Tokens below this one weigh, all together, less than half of what top_p leaves out.
        reach = tl.log((1 - top_p) / (2.0 * COUNT))
        bound = tl.maximum(floor, best + temperature * reach)
    tl.store(best_ptr + row, best)
    tl.store(floor_ptr + row, floor)
    tl.store(bound_ptr + row, bound)
    tl.store(length_ptr + row, 0)
    tl.store(total_ptr + row, tl.zeros((), tl.int64))


@triton.jit
def _collect_kernel(
    list_ptr, list_id_ptr, length_ptr, total_ptr, logits_ptr, best_ptr, floor_ptr, bound_ptr,
    floats_ptr, ints_ptr, COUNT: tl.constexpr, VOCAB: tl.constexpr, FLOATS_ROW: tl.constexpr,
    INTS_ROW: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    temperature, top_p, min_p, top_k = _filters(floats_ptr, ints_ptr, row, FLOATS_ROW, INTS_ROW)
    best = tl.load(best_ptr + row)
    usable = (best < float("inf")) & (best > float("-inf"))
    if _cuts(top_p, min_p, top_k, VOCAB) & usable:
        columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        live = columns < COUNT
        logits = tl.load(logits_ptr + row * COUNT + columns, mask=live, other=float("-inf"))
        if (top_p < 1) & (top_k >= VOCAB):
            mass = tl.where(
                live & (logits >= tl.load(floor_ptr + row)), _mass(logits, best, temperature), 0
            )
            tl.atomic_add(total_ptr + row, tl.sum(mass, 0))
        kept = live & (logits >= tl.load(bound_ptr + row))
        number = tl.sum(kept.to(tl.int32), 0)
        if number > 0:
            place = tl.atomic_add(length_ptr + row, number) + tl.cumsum(kept.to(tl.int32), 0) - 1
            kept = kept & (place < CAPACITY)
            tl.store(list_ptr + row * CAPACITY + place, logits, mask=kept)
            tl.store(list_id_ptr + row * CAPACITY + place, columns, mask=kept)


@triton.jit
def _part(list_ptr, list_id_ptr, logits_ptr, first, length, listed, CHUNK: tl.constexpr):
    """(logits, ids) of a chunk of the list, or of the row where the list was too short."""
    places = first + tl.arange(0, CHUNK)
    live = places < length
    logits = tl.load(list_ptr + places, mask=live & listed, other=float("-inf"))
    ids = tl.load(list_id_ptr + places, mask=live & listed, other=0)
    in_row = live & (listed == 0)
    logits = tl.where(in_row, tl.load(logits_ptr + places, mask=in_row, other=0.0), logits)
    return logits, tl.where(in_row, places, ids), live


@triton.jit
def _kth_key(
    list_ptr, list_id_ptr, logits_ptr, length, listed, low, high, top_k, WAYS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest key in [low, high] that at least top_k tokens reach; ``low`` is one."""
    ways = tl.arange(0, WAYS).to(tl.int64)
    while low < high:
        step = (high - low + WAYS) // WAYS
        limits = low + ways * step
        reached = tl.zeros((WAYS,), tl.int64)
        for first in range(0, length, CHUNK):
            logits, ids, live = _part(
                list_ptr, list_id_ptr, logits_ptr, first, length, listed, CHUNK
            )
            key = _ordered(logits)
            hit = live[None, :] & (key[None, :] >= limits[:, None])
            reached += tl.sum(hit.to(tl.int64), 1)
        low += step * (tl.sum((reached >= top_k).to(tl.int64), 0) - 1)
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def _mass_from(
    list_ptr, list_id_ptr, logits_ptr, length, listed, low, best, temperature, CHUNK: tl.constexpr
):  # fmt: skip
    total = tl.zeros((), tl.int64)
    for first in range(0, length, CHUNK):
        logits, ids, live = _part(list_ptr, list_id_ptr, logits_ptr, first, length, listed, CHUNK)
        kept = live & (_ordered(logits) >= low)
        total += tl.sum(tl.where(kept, _mass(logits, best, temperature), 0), 0)
    return total


@triton.jit
def _nucleus_key(
    list_ptr, list_id_ptr, logits_ptr, length, listed, low, high, best, temperature, limit,
    WAYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The smallest key in [low, high] with mass below ``limit`` above it; ``high`` is one."""
    ways = tl.arange(0, WAYS).to(tl.int64)
    while low < high:
        step = (high - low + WAYS) // WAYS
        limits = tl.maximum(high - ways * step, low)
        above = tl.zeros((WAYS,), tl.int64)
        for first in range(0, length, CHUNK):
            logits, ids, live = _part(
                list_ptr, list_id_ptr, logits_ptr, first, length, listed, CHUNK
            )
            key, mass = _ordered(logits), _mass(logits, best, temperature)
            over = live[None, :] & (key[None, :] > limits[:, None])
            above += tl.sum(tl.where(over, mass[None, :], 0), 1)
        high -= step * (tl.sum((above.to(tl.float64) < limit).to(tl.int64), 0) - 1)
        high = tl.maximum(high, low)
        low = tl.maximum(low, high - step + 1)
    return high


@triton.jit
def _draw_from(
    list_ptr, list_id_ptr, logits_ptr, length, listed, low, seed, position, temperature,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Best noisy score among the kept and the lowest id that has it, in whatever order they lie."""
    best, chosen = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.int32)
    for first in range(0, length, CHUNK):
        logits, ids, live = _part(list_ptr, list_id_ptr, logits_ptr, first, length, listed, CHUNK)
        kept = live & (_ordered(logits) >= low)
        scores = noisy_scores(logits, ids, seed, position, temperature)
        scores = tl.where(kept, scores, float("-inf"))
        top = tl.max(scores, 0)
        lowest = tl.min(tl.where(kept & (scores == top), ids, 0x7FFFFFFF), 0)
        wins = (top > best) | ((top == best) & (lowest < chosen))
        best, chosen = tl.where(wins, top, best), tl.where(wins, lowest, chosen)
    return best, chosen


@triton.jit
def _select_kernel(
    best_score_ptr, best_id_ptr, score_ptr, id_ptr, list_ptr, list_id_ptr, length_ptr, total_ptr,
    logits_ptr, best_ptr, bound_ptr, floats_ptr, ints_ptr, COUNT: tl.constexpr,
    VOCAB: tl.constexpr, FLOATS_ROW: tl.constexpr, INTS_ROW: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr, CAPACITY: tl.constexpr,
    WAYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, PADDED_SPLITS)
    live = splits < NUM_SPLITS
    scores = tl.load(score_ptr + row * NUM_SPLITS + splits, mask=live, other=float("-inf"))
    score, split = best_of(scores)
    chosen = tl.load(id_ptr + row * NUM_SPLITS + split)
    temperature, top_p, min_p, top_k = _filters(floats_ptr, ints_ptr, row, FLOATS_ROW, INTS_ROW)
    usable = (score < float("inf")) & (score > float("-inf"))
    if _cuts(top_p, min_p, top_k, VOCAB) & usable:
        best = tl.load(best_ptr + row)
        length = tl.load(length_ptr + row)
        listed = length <= CAPACITY
        length = tl.where(listed, length, COUNT)
        at, at_id = list_ptr + row * CAPACITY, list_id_ptr + row * CAPACITY
        in_row = logits_ptr + row * COUNT
        low, high = _ordered(tl.load(bound_ptr + row)), _ordered(best)
        total = tl.load(total_ptr + row)
        if top_k < VOCAB:
            if tl.load(length_ptr + row) > top_k:
                low = _kth_key(at, at_id, in_row, length, listed, low, high, top_k, WAYS, CHUNK)
            total = _mass_from(at, at_id, in_row, length, listed, low, best, temperature, CHUNK)
        if top_p < 1:
            limit = total.to(tl.float64) * top_p.to(tl.float64)
            low = _nucleus_key(
                at, at_id, in_row, length, listed, low, high, best, temperature, limit, WAYS,
                CHUNK,
            )  # fmt: skip
        seed, position = tl.load(ints_ptr + row * INTS_ROW), tl.load(ints_ptr + row * INTS_ROW + 1)
        score, chosen = _draw_from(
            at, at_id, in_row, length, listed, low, seed, position, temperature, CHUNK
        )
    tl.store(best_score_ptr + row, score)
    tl.store(best_id_ptr + row, chosen)


def draw_filtered(
    logits: Tensor, lanes: LaneSampling, *, capacity: int = LIST_CAPACITY
) -> tuple[Tensor, Tensor]:
    """Score and id of the token that each lane draws from what its filters keep.

    Args:
        logits: [rows, at least vocab_size] float32, contiguous, over all shards.
        capacity: tokens of a row that are looked at without going through the whole row again.

    Returns:
        scores [rows, 1] float32, not finite for unusable rows, and ids [rows, 1] int32.
    """
    rows, count = logits.shape
    num_splits = triton.cdiv(count, BLOCK)
    sizes = {
        "COUNT": count, "VOCAB": lanes.vocab_size, "FLOATS_ROW": lanes.temperature.stride(0),
        "INTS_ROW": lanes.seed.stride(0),
    }  # fmt: skip
    splits = {"NUM_SPLITS": num_splits, "PADDED_SPLITS": triton.next_power_of_2(num_splits)}
    floats, ints = lanes.temperature, lanes.seed

    def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    scores, ids = scratch(num_splits, dtype=torch.float32), scratch(num_splits, dtype=torch.int32)
    best, floor, bound = (scratch(dtype=torch.float32) for _ in range(3))
    length, total = scratch(dtype=torch.int32), scratch(dtype=torch.int64)
    listed, listed_ids = (
        scratch(capacity, dtype=torch.float32),
        scratch(capacity, dtype=torch.int32),
    )
    drawn, drawn_ids = scratch(1, dtype=torch.float32), scratch(1, dtype=torch.int32)
    _splits_kernel[(num_splits, rows)](
        scores, ids, logits, floats, ints, NUM_SPLITS=num_splits, BLOCK=BLOCK, num_warps=4, **sizes
    )
    _bounds_kernel[(rows,)](
        best, floor, bound, length, total, scores, floats, ints, num_warps=4, **sizes, **splits
    )
    _collect_kernel[(num_splits, rows)](
        listed, listed_ids, length, total, logits, best, floor, bound, floats, ints,
        CAPACITY=capacity, BLOCK=BLOCK, num_warps=4, **sizes,
    )  # fmt: skip
    _select_kernel[(rows,)](
        drawn, drawn_ids, scores, ids, listed, listed_ids, length, total, logits, best, bound,
        floats, ints, CAPACITY=capacity, WAYS=_WAYS, CHUNK=_CHUNK, num_warps=16, **sizes, **splits,
    )  # fmt: skip
    return drawn, drawn_ids
