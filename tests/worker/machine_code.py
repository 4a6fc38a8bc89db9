"""Makes machine code of the fused sum for Hopper, which takes no GPU: bytes of it for each world.

python tests/worker/machine_code.py SIZE WORLD...
"""

import sys

import triton
from hopper import compile_for_hopper

from lockstep.worker.kernels.push import waiting
from lockstep.worker.kernels.sum_norm import _sum_norm_kernel

MAX_ROWS = 132
_TYPES = {
    "eps": "fp32", "addresses_ptr": "*i64", "epochs_ptr": "*i32", "late_ptr": "*i32",
    "rank": "i32", "looks": "i32",
}  # fmt: skip


def code_bytes(size: int, world: int) -> int:
    """Of the kernel for rows of ``size`` bfloat16 on ``world`` ranks."""
    source_bytes, lines = 4 * size, triton.next_power_of_2(size // 4)
    asm, constraints = waiting(world, source_bytes)
    fixed = {
        "SIZE": size, "RESIDUAL_ROW": size, "LINES": lines, "WORLD": world, "MAX_ROWS": MAX_ROWS,
        "SOURCE_BYTES": source_bytes, "ASM": asm, "CONSTRAINTS": constraints, "CHAINED": True,
    }  # fmt: skip
    num_warps = min(32, max(1, lines // 32))
    compiled = compile_for_hopper(_sum_norm_kernel, _TYPES, fixed, num_warps=num_warps)
    return len(compiled.asm["cubin"])


if __name__ == "__main__":
    size, *worlds = map(int, sys.argv[1:])
    sys.stdout.write(" ".join(str(code_bytes(size, world)) for world in worlds) + "\n")
