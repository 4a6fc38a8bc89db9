"""Gumbel-max draw over a vocabulary shard in two kernels. CUDA, Triton.

The noise is that of ``worker.noise``, bit for bit up to the logarithms. Multiply-adds are spelled
out, so that no compiler's choice to fuse can make two specialisations differ.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.sampling_state import LaneSampling

# Small enough that a batch of one keeps every multiprocessor busy over 150,000 ids.
BLOCK = 1024


@triton.jit
def _fmix32(bits):
    bits ^= bits >> 16
    bits *= 0x85EBCA6B
    bits ^= bits >> 13
    bits *= 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _lane_keys(seed, position):
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key_1 = _fmix32(_fmix32(position.to(tl.uint32) + 0x9E3779B9) ^ low)
    key_2 = _fmix32(_fmix32(key_1 + 0x9E3779B9) ^ high)
    return key_1, key_2


@triton.jit
def _gumbel(ids, key_1, key_2):
    bits = _fmix32(_fmix32(ids.to(tl.uint32) ^ key_1) ^ key_2)
    uniform = (bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * (2.0**-31) + (2.0**-32)
    uniform = tl.minimum(uniform, 1 - 2.0**-24)
    # -log(1 - u). Near 0, where the winners are, 1 - u would lose the digits: five terms of the
    # series are exact to float32 there.
    series = tl.fma(uniform, 1 / 5, 1 / 4)
    series = tl.fma(uniform, series, 1 / 3)
    series = tl.fma(uniform, series, 1 / 2)
    series = tl.fma(uniform, series, 1.0) * uniform
    exponential = tl.where(uniform < 1 / 32, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def noisy_scores(logits, ids, seed, position, temperature):
    """logits + temperature * noise; NaN becomes +inf, since a maximum need not keep NaN."""
    scores = logits
    if temperature > 0:
        key_1, key_2 = _lane_keys(seed, position)
        noise = _gumbel(ids, key_1, key_2)
        scores = tl.fma(noise, temperature, logits)
    return tl.where(scores == scores, scores, float("inf"))


@triton.jit
def best_of(scores):
    """The largest score and its lowest index."""
    return tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit(do_not_specialize=["start"])
def _split_best_kernel(
    score_ptr, id_ptr, logits_ptr, temperature_ptr, seed_ptr, position_ptr, start,
    COUNT: tl.constexpr, LOGITS_ROW: tl.constexpr, FLOATS_ROW: tl.constexpr,
    INTS_ROW: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = split * BLOCK + tl.arange(0, BLOCK)
    live = columns < COUNT
    logits = tl.load(logits_ptr + row * LOGITS_ROW + columns, mask=live, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row * FLOATS_ROW)
    seed = tl.load(seed_ptr + row * INTS_ROW)
    position = tl.load(position_ptr + row * INTS_ROW)
    ids = start + columns
    best, index = best_of(noisy_scores(logits, ids, seed, position, temperature))
    tl.store(score_ptr + row * NUM_SPLITS + split, best)
    tl.store(id_ptr + row * NUM_SPLITS + split, start + split * BLOCK + index)


@triton.jit
def _merge_kernel(
    best_score_ptr, best_id_ptr, score_ptr, id_ptr,
    NUM_SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, PADDED_SPLITS)
    live = splits < NUM_SPLITS
    scores = tl.load(score_ptr + row * NUM_SPLITS + splits, mask=live, other=float("-inf"))
    best, split = best_of(scores)
    tl.store(best_score_ptr + row, best)
    tl.store(best_id_ptr + row, tl.load(id_ptr + row * NUM_SPLITS + split).to(tl.int64))


def split_best(logits: Tensor, lanes: LaneSampling, start: int) -> tuple[Tensor, Tensor]:
    """Best noisy score and its id for every lane and every BLOCK ids: [rows, splits] each.

    Args:
        logits: [rows, count] float32 of ids ``start`` onwards; a row's columns are contiguous.
    """
    rows, count = logits.shape
    num_splits = triton.cdiv(count, BLOCK)
    scores = torch.empty(rows, num_splits, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, num_splits, dtype=torch.int32, device=logits.device)
    _split_best_kernel[(num_splits, rows)](
        scores, ids, logits, lanes.temperature, lanes.seed, lanes.position, start, COUNT=count,
        LOGITS_ROW=logits.stride(0) if rows > 1 else count, FLOATS_ROW=lanes.temperature.stride(0),
        INTS_ROW=lanes.seed.stride(0), NUM_SPLITS=num_splits, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return scores, ids


def draw(logits: Tensor, lanes: LaneSampling, start: int) -> tuple[Tensor, Tensor]:
    """``worker.draw.draw`` for any temperature: scores [rows] float32, +inf for a row with NaN or
    +inf, and ids [rows] int64."""
    split_scores, split_ids = split_best(logits, lanes, start)
    rows, num_splits = split_scores.shape
    scores = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _merge_kernel[(rows,)](
        scores, ids, split_scores, split_ids, NUM_SPLITS=num_splits,
        PADDED_SPLITS=triton.next_power_of_2(num_splits), num_warps=1,
    )  # fmt: skip
    return scores, ids
