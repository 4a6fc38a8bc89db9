"""The time on the device, written by the device. CUDA, Triton."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _stamp_kernel(times_ptr, counter_ptr, DEPTH: tl.constexpr, WHICH: tl.constexpr):
    step = tl.load(counter_ptr)
    tl.store(times_ptr + step % DEPTH * 2 + WHICH, tl.extra.cuda.globaltimer())
    tl.store(counter_ptr, step + WHICH)


def stamp(times: Tensor, counter: Tensor, which: int) -> None:
    """Note the time of the step that ``counter`` says.

    Args:
        times: [depth, 2] int64 nanoseconds.
        counter: [1] int64, steps that have ended.
        which: column of ``times``: 0 is a step's begin, 1 its end, which counts it.
    """
    _stamp_kernel[(1,)](times, counter, DEPTH=len(times), WHICH=which, num_warps=1)
