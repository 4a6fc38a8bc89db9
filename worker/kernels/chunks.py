"""The chunks of a context: what each leaves behind, and how they are added up. Triton.

How a context is cut follows from its length alone, and all sums of chunks go through ``merge``, in
order. So the answer depends neither on the number of programs that share them nor on the batch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Least tokens of a chunk: of contexts up to SHORT, and of longer ones.
SHORT = 512
SHORT_CHUNK = 64
MIN_CHUNK = 128
PROGRAMS_PER_SM = 2
# Chunks whose partial results are on their way together.
_AT_ONCE: tl.constexpr = tl.constexpr(8)


@triton.jit
def chunk_length(
    context, TILE: tl.constexpr, SHORT: tl.constexpr, SHORT_CHUNK: tl.constexpr,
    MIN_CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Tokens of every chunk but the last."""
    least = tl.where(context <= SHORT, SHORT_CHUNK, MIN_CHUNK)
    return tl.maximum(tl.cdiv(tl.cdiv(context, MAX_CHUNKS), TILE) * TILE, least)


@triton.jit
def merge(highest, total, acc, other_highest, other_total, other_acc):
    """Softmax over the keys of both: maxima [heads], sums [heads], weighted values [heads, dims].

    Fused by hand: the compiler might round one use of it otherwise than another.
    """
    new_highest = tl.maximum(highest, other_highest)
    own = tl.exp2(highest - new_highest)
    other = tl.exp2(other_highest - new_highest)
    total = tl.fma(total, own, other_total * other)
    acc = tl.fma(acc, own[:, None], other_acc * other[:, None])
    return new_highest, total, acc


@triton.jit
def merge_chunks(
    out_ptr, part_acc_ptr, part_max_ptr, part_sum_ptr, num_chunks,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Pointers are those of the first head of the group; .cg skips a possibly stale L1."""
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, HEAD_PAD)
    mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    highest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, HEAD_PAD], tl.float32)
    for first in range(0, num_chunks, _AT_ONCE):
        for i in tl.static_range(_AT_ONCE):
            chunk = first + i
            used = chunk < num_chunks
            place = heads * MAX_CHUNKS + chunk
            live = (heads < GROUP) & used
            part_max = tl.load(part_max_ptr + place, mask=live, other=0.0, cache_modifier=".cg")
            part_sum = tl.load(part_sum_ptr + place, mask=live, other=1.0, cache_modifier=".cg")
            part_acc = tl.load(
                part_acc_ptr + place[:, None] * HEAD_DIM + dims[None, :],
                mask=mask & used, other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            part_max = tl.where(used, part_max, float("-inf"))
            highest, total, acc = merge(highest, total, acc, part_max, part_sum, part_acc)
    out = out_ptr + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def max_chunks(num_kv_heads: int) -> int:
    """Most chunks of a context: enough for one row to fill the device, whatever the kv heads."""
    wanted: int = triton.next_power_of_2(256 // num_kv_heads)
    return min(64, max(8, wanted))


def cutting(num_kv_heads: int) -> dict[str, int]:
    """What ``chunk_length`` is compiled with."""
    return {
        "SHORT": SHORT,
        "SHORT_CHUNK": SHORT_CHUNK,
        "MIN_CHUNK": MIN_CHUNK,
        "MAX_CHUNKS": max_chunks(num_kv_heads),
    }


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
            num_sms=num_multiprocessors(device),
        )

    def num_programs(self, num_rows: int, max_context_len: int) -> int:
        """Programs a row and kv head; a choice of speed alone, no result depends on it."""
        num_kv_heads = self.arrivals.shape[1]
        most = min(max_chunks(num_kv_heads), -(-max_context_len // SHORT_CHUNK))
        if self.is_full(num_rows):
            return 1
        wanted = self._wanted(num_rows)
        return max(1, min(most, 1 << wanted.bit_length() >> 1))

    def is_full(self, num_rows: int) -> bool:
        """Whether one program of twice the warps is faster than two that add up.

        It is where rows and kv heads are nearly as many as multiprocessors, with heads enough.
        """
        num_heads, num_kv_heads = self.partial_acc.shape[1], self.arrivals.shape[1]
        return self._wanted(num_rows) == 2 and num_heads >= 4 * num_kv_heads

    def _wanted(self, num_rows: int) -> int:
        return PROGRAMS_PER_SM * self.num_sms // (num_rows * self.arrivals.shape[1])

    def check(self, num_rows: int) -> None:
        limit = self.arrivals.shape[0]
        if num_rows > limit:
            raise ValueError(f"num_rows must be at most {limit} (workspace), got {num_rows}")


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
