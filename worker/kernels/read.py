"""A kernel that only reads: what a device's memory gives at best. CUDA, Triton."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_NUM_WARPS = 8  # 16 elements a thread: four loads of 16 bytes in flight


@triton.jit
def _read_kernel(buffer_ptr, found_ptr, num_blocks, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    folded = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(tl.program_id(0).to(tl.int64), num_blocks, tl.num_programs(0)):
        folded ^= tl.load(buffer_ptr + block * BLOCK + offsets)
    tl.store(found_ptr + tl.program_id(0), tl.xor_sum(folded, axis=0))


def num_blocks(buffer: Tensor) -> int:
    """The most programs that have something to read; a rest below a block is not read."""
    return buffer.numel() // _BLOCK


def read(buffer: Tensor, found: Tensor) -> None:
    """Read a buffer [n] int32 once, by as many programs as ``found`` [programs] int32 has places.

    Each leaves the exclusive or of what it read there, so that nobody can leave the reading out.
    """
    _read_kernel[(len(found),)](
        buffer, found, num_blocks(buffer), BLOCK=_BLOCK, num_warps=_NUM_WARPS
    )
