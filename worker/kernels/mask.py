"""``worker.masks`` in one kernel. CUDA, Triton."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


# How many lanes have a mask changes with every step: no number may mean a compilation.
@triton.jit(do_not_specialize=["start"], do_not_specialize_on_alignment=["lanes_ptr"])
def _forbid_kernel(
    logits_ptr, lanes_ptr, words_ptr, start, COUNT: tl.constexpr, LOGITS_ROW: tl.constexpr,
    NUM_WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    lane = tl.load(lanes_ptr + row).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = columns < COUNT
    ids = start + columns
    place = ids >> 5
    words = tl.load(words_ptr + row * NUM_WORDS + place, mask=live & (place < NUM_WORDS), other=0)
    forbidden = live & (((words >> (ids & 31)) & 1) == 0)
    at = logits_ptr + lane * LOGITS_ROW + columns
    logits = tl.load(at, mask=forbidden, other=0.0)
    tl.store(at, float("-inf"), mask=forbidden & (logits < float("inf")))


def forbid(logits: Tensor, lanes: Tensor, words: Tensor, start: int) -> None:
    """Put -inf into ``logits`` for every id whose bit is not set.

    Args:
        logits: [n, vocab_local] float32 of the ids from ``start`` on.
        lanes: [m] int32, the rows that have a mask.
        words: [m, num_words] int32, a bit for every id of the whole vocabulary.
    """
    count = logits.shape[1]
    _forbid_kernel[(triton.cdiv(count, _BLOCK), len(lanes))](
        logits, lanes, words, start, COUNT=count, LOGITS_ROW=logits.stride(0),
        NUM_WORDS=words.shape[1], BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
