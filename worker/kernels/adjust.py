"""min_tokens, logit_bias and penalties in two kernels, as ``worker.filters.adjust``. CUDA, Triton.

One kernel copies the logits and penalises rows with penalties; the other writes the few ids that a
row biases or holds back once more. Rows that ask for nothing are only copied.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.comm.sampling import MAX_LOGIT_BIAS
from lockstep.worker.sampling_state import MAX_LANE_STOP_IDS, LaneSampling

_BLOCK = 2048


@triton.jit
def _penalised(logits, history, repetition, frequency, presence):
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where(history > 0, repeated, logits)
    count = (history >> 1).to(tl.float32)
    return logits - frequency * count - presence * (count > 0).to(tl.float32)


@triton.jit
def _penalties_kernel(
    out_ptr, logits_ptr, history_ptr, repetition_ptr, frequency_ptr, presence_ptr,
    COUNT: tl.constexpr, LOGITS_ROW: tl.constexpr, FLOATS_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = columns < COUNT
    logits = tl.load(logits_ptr + row * LOGITS_ROW + columns, mask=live)
    repetition = tl.load(repetition_ptr + row * FLOATS_ROW)
    frequency = tl.load(frequency_ptr + row * FLOATS_ROW)
    presence = tl.load(presence_ptr + row * FLOATS_ROW)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        history = tl.load(history_ptr + row * COUNT + columns, mask=live, other=0)
        logits = _penalised(logits, history, repetition, frequency, presence)
    tl.store(out_ptr + row * COUNT + columns, logits, mask=live)


@triton.jit(do_not_specialize=["start"])
def _ids_kernel(
    out_ptr, logits_ptr, history_ptr, repetition_ptr, frequency_ptr, presence_ptr, bias_ids_ptr,
    bias_values_ptr, stop_ids_ptr, position_ptr, min_tokens_ptr, start, COUNT: tl.constexpr,
    LOGITS_ROW: tl.constexpr, FLOATS_ROW: tl.constexpr, INTS_ROW: tl.constexpr,
    NUM_BIAS: tl.constexpr, PADDED_BIAS: tl.constexpr, NUM_STOPS: tl.constexpr,
    PADDED_STOPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PADDED_BIAS)
    ids = tl.load(bias_ids_ptr + row * INTS_ROW + places, mask=places < NUM_BIAS, other=-1)
    held = (ids >= start) & (ids < start + COUNT)
    local = ids - start
    bias = tl.load(bias_values_ptr + row * FLOATS_ROW + places, mask=held, other=0.0)
    logits = tl.load(logits_ptr + row * LOGITS_ROW + local, mask=held, other=0.0)
    history = tl.load(history_ptr + row * COUNT + local, mask=held, other=0)
    biased = _penalised(
        logits + bias, history, tl.load(repetition_ptr + row * FLOATS_ROW),
        tl.load(frequency_ptr + row * FLOATS_ROW), tl.load(presence_ptr + row * FLOATS_ROW),
    )  # fmt: skip
    tl.store(out_ptr + row * COUNT + local, biased, mask=held)
    # An id may be biased and held back: the second store must come second.
    tl.debug_barrier()
    if tl.load(position_ptr + row * INTS_ROW) < tl.load(min_tokens_ptr + row * INTS_ROW):
        stops = tl.arange(0, PADDED_STOPS)
        stop_ids = tl.load(stop_ids_ptr + row * INTS_ROW + stops, mask=stops < NUM_STOPS, other=-1)
        ours = (stop_ids >= start) & (stop_ids < start + COUNT)
        place = row * LOGITS_ROW + stop_ids - start
        # NaN and +inf must stay what they are, to be noticed.
        ours = ours & (tl.load(logits_ptr + place, mask=ours, other=0.0) < float("inf"))
        tl.store(out_ptr + row * COUNT + stop_ids - start, float("-inf"), mask=ours)


def adjust(logits: Tensor, lanes: LaneSampling) -> Tensor:
    """A new [rows, vocab_local] tensor; a row of ``logits`` has contiguous columns."""
    rows, count = logits.shape
    out = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    logits_row = logits.stride(0) if rows > 1 else count
    penalties = (lanes.repetition_penalty, lanes.frequency_penalty, lanes.presence_penalty)
    floats_row, ints_row = lanes.temperature.stride(0), lanes.position.stride(0)
    _penalties_kernel[(triton.cdiv(count, _BLOCK), rows)](
        out, logits, lanes.history, *penalties, COUNT=count, LOGITS_ROW=logits_row,
        FLOATS_ROW=floats_row, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    _ids_kernel[(rows,)](
        out, logits, lanes.history, *penalties, lanes.bias_ids, lanes.bias_values,
        lanes.stop_ids, lanes.position, lanes.min_tokens, lanes.vocab_start, COUNT=count,
        LOGITS_ROW=logits_row, FLOATS_ROW=floats_row, INTS_ROW=ints_row,
        NUM_BIAS=MAX_LOGIT_BIAS, PADDED_BIAS=triton.next_power_of_2(MAX_LOGIT_BIAS),
        NUM_STOPS=MAX_LANE_STOP_IDS, PADDED_STOPS=triton.next_power_of_2(MAX_LANE_STOP_IDS),
        num_warps=4,
    )  # fmt: skip
    return out
