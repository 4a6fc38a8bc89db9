"""Makes machine code of the fused sum for Hopper, which takes no GPU, for each world.

python tests/worker/machine_code.py SIZE WORLD...

Prints for each its bytes where a program has one row, those where it has several, and how often
threads load 16 bytes in them, which would be two lines.
"""

import sys

from hopper import compile_for_hopper
from triton.compiler import CompiledKernel

from lockstep.worker.kernels.sum_norm import _sum_norm_kernel, constants

MAX_ROWS = 132
_TYPES = {
    "eps": "fp32", "rows": "i32", "addresses_ptr": "*i64", "epochs_ptr": "*i32",
    "late_ptr": "*i32", "rank": "i32", "looks": "i32",
}  # fmt: skip


def machine_code(size: int, world: int, several: bool) -> CompiledKernel:
    """Of the kernel for rows of ``size`` bfloat16 on ``world`` ranks."""
    fixed = {
        "SIZE": size, "RESIDUAL_ROW": size, "MAX_ROWS": MAX_ROWS, "SEVERAL": several,
        "CHAINED": True, **constants(2 * size, world, 4 * size),
    }  # fmt: skip
    num_warps = int(fixed.pop("num_warps"))
    return compile_for_hopper(_sum_norm_kernel, _TYPES, fixed, num_warps=num_warps)


def numbers(size: int, world: int) -> list[int]:
    both = [machine_code(size, world, several) for several in (False, True)]
    wide = sum(code.asm["ptx"].count("ld.global.v2.b64") for code in both)
    return [*(len(code.asm["cubin"]) for code in both), wide]


if __name__ == "__main__":
    size, *worlds = map(int, sys.argv[1:])
    found = [number for world in worlds for number in numbers(size, world)]
    sys.stdout.write(" ".join(map(str, found)) + "\n")
