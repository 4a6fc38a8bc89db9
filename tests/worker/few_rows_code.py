"""Compiles products of few rows for Hopper, which takes no GPU, and prints their global stores.

python tests/worker/few_rows_code.py OUT_SIZE IN_SIZE LANES plain|adding

"adding" is the product that adds the residual and norms half.
"""

import re
import sys

from hopper import compile_for_hopper

from lockstep.worker.kernels.few_rows import _few_rows_kernel
from lockstep.worker.kernels.linear_tiles import few_rows_tiles

_POINTERS = ("residual_ptr", "norm_ptr", "total_ptr", "squares_ptr")
_ENDS: dict[str, dict[str, object]] = {
    "plain": {"HAS_BIAS": True, **dict.fromkeys(_POINTERS)},
    "adding": {"HAS_BIAS": False},
}


def stores(out_size: int, in_size: int, lanes: int, end: str) -> list[str]:
    """Their forms in the assembly of an unsplit product."""
    tiles = few_rows_tiles(out_size, in_size, lanes, gated=False)
    types = {
        "x_tiles": f"tensordesc<bf16[{lanes}, {tiles.tile_k}]>",
        "w_tiles": f"tensordesc<bf16[{tiles.tile_n}, {tiles.tile_k}]>",
        "part_ptr": "*fp32", "arrivals_ptr": "*i32", "num_rows": "i32",
        "squares_ptr": "*fp32", "eps": "fp32",
    }  # fmt: skip
    fixed = {
        "OUT": out_size, "SIZE": in_size, "GATED": False, "SPLITS": 1,
        "SPLIT_SIZE": in_size, "LANES": lanes, "TILE_N": tiles.tile_n, "TILE_K": tiles.tile_k,
        "AHEAD": 64, "CHAINED": True, "NUM_SQUARES": 0, **_ENDS[end],
    }  # fmt: skip
    compiled = compile_for_hopper(
        _few_rows_kernel, types, fixed, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )
    return sorted(set(re.findall(r"st\.global[.\w]*", compiled.asm["ptx"])))


if __name__ == "__main__":
    *sizes, end = sys.argv[1:]
    sys.stdout.write(" ".join(stores(*map(int, sizes), end)) + "\n")
