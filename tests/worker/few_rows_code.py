"""Compiles products of few rows for Hopper, which takes no GPU, and prints their global stores.

python tests/worker/few_rows_code.py OUT_SIZE IN_SIZE LANES
"""

import re
import sys

from hopper import compile_for_hopper

from lockstep.worker.kernels.few_rows import _few_rows_kernel
from lockstep.worker.kernels.linear_tiles import few_rows_tiles


def stores(out_size: int, in_size: int, lanes: int) -> list[str]:
    """Their forms in the assembly of an unsplit product."""
    tiles = few_rows_tiles(out_size, in_size, lanes, gated=False)
    types = {
        "x_tiles": f"tensordesc<bf16[{lanes}, {tiles.tile_k}]>",
        "w_tiles": f"tensordesc<bf16[{tiles.tile_n}, {tiles.tile_k}]>",
        "part_ptr": "*fp32", "arrivals_ptr": "*i32", "num_rows": "i32",
    }  # fmt: skip
    fixed = {
        "OUT": out_size, "SIZE": in_size, "GATED": False, "HAS_BIAS": True, "SPLITS": 1,
        "SPLIT_SIZE": in_size, "LANES": lanes, "TILE_N": tiles.tile_n, "TILE_K": tiles.tile_k,
        "AHEAD": 64, "CHAINED": True,
    }  # fmt: skip
    compiled = compile_for_hopper(
        _few_rows_kernel, types, fixed, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )
    return sorted(set(re.findall(r"st\.global[.\w]*", compiled.asm["ptx"])))


if __name__ == "__main__":
    sys.stdout.write(" ".join(stores(*map(int, sys.argv[1:]))) + "\n")
