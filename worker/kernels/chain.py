"""A kernel that starts while the one ahead of it ends (programmatic dependent launch, Hopper on).

Such a kernel may read weights at once, which nobody writes while serving, and what was written
before the kernel ahead began: that one lets the next start only once ``follow`` has returned in
all its programs, so all that came before it has ended. Read such numbers past the first cache
(``.cg``), which knows of no boundary between kernels here. All else only after ``follow``. Every
program must call ``follow``, or the kernel after it could overtake the one ahead of it.
"""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Wait until the kernel ahead has ended and its writes are seen; then let the next start."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(places, wanted):
    """Ask for the lines at pointers ``places`` to be brought into L2 where ``wanted``."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r", [places.to(tl.int64), wanted.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefetch_rows(
    weight_ptr, rows, begin, SIZE: tl.constexpr, AHEAD: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """Ask for ``AHEAD`` two-byte elements from ``begin`` of some rows to be brought into L2.

    ``AHEAD`` is a multiple of 64, which is a line.
    """
    if CHAINED and AHEAD > 0:
        LINES: tl.constexpr = AHEAD // 64
        lines = tl.arange(0, triton.next_power_of_2(LINES))
        at = begin + lines * 64
        places = weight_ptr + rows[:, None].to(tl.int64) * SIZE + at[None, :]
        fetch(places, ((lines < LINES) & (at < SIZE))[None, :])


def chained(*, pays: bool = True) -> dict[str, bool]:
    """Launch options of a kernel that calls ``follow``; not chained where it does not pay."""
    on = pays and has_dependent_launch()
    return {"CHAINED": on, "launch_pdl": on}


@functools.cache
def has_dependent_launch() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
