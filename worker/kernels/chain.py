"""A kernel that starts while the one ahead of it ends (programmatic dependent launch, Hopper on).

Such a kernel may read weights at once, which nobody writes while serving; all else only after
``follow``, which every program must call, or the kernel after it could overtake the one ahead of
it. ``follow`` waits until the kernel ahead has ended, and with it all before that, and lets the
next kernel start: only then, or at once, so that the next one's first weights come earlier.

What was written before the last kernel ahead that let its next start only then has been written
when a kernel starts, and may be read at once too; past the first cache (``.cg``), which knows of no
boundary between kernels here.
"""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def follow(CHAINED: tl.constexpr, NEXT_FIRST: tl.constexpr = False):
    """Wait until the kernel ahead has ended and its writes are seen, and let the next start.

    The next one may start before the wait where ``NEXT_FIRST``.
    """
    if CHAINED:
        if NEXT_FIRST:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def chained() -> dict[str, bool]:
    """Launch options of a kernel that calls ``follow``."""
    on = has_dependent_launch()
    return {"CHAINED": on, "launch_pdl": on}


@functools.cache
def has_dependent_launch() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
