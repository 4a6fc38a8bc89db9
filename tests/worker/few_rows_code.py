"""Compiles products of few rows for Hopper, which takes no GPU, and prints what their code does.

python tests/worker/few_rows_code.py OUT_SIZE IN_SIZE LANES END

END is plain; gated; adding, the product that adds the residual and norms half; normed, the gated
one that norms the other half; or wide, with float32 results. Prints JSON.
"""

import json
import re
import sys

from hopper import compile_for_hopper, stack_bytes, tiles_type

from lockstep.worker.kernels.few_rows_kernel import few_rows_kernel
from lockstep.worker.kernels.linear_tiles import Ring, few_rows_ring, starts_next_first

_ADDING = ("residual_ptr", "norm_ptr", "total_ptr", "squares_ptr")
_NO_NORM = dict.fromkeys(_ADDING)
_ENDS: dict[str, dict[str, object]] = {
    "plain": {"HAS_BIAS": True, **_NO_NORM},
    "gated": {"GATED": True, **_NO_NORM},
    "adding": {},
    "normed": {"GATED": True, "NUM_SQUARES": 64, **dict.fromkeys(_ADDING[:3])},
    "wide": _NO_NORM,
}
# What a thread does, in order, of what the order matters of.
_MARKS = {
    "cp.async.bulk.tensor": "ask",
    "griddepcontrol.wait": "wait",
    "griddepcontrol.launch_dependents": "let next start",
    "wgmma.wait_group": "products done",
    "bar.sync": "meet",
    "st.global": "store",
    "atom.global": "arrive",
}


def _constants(ring: Ring, out_size: int, in_size: int, lanes: int, end: str) -> dict[str, object]:
    ends = {"GATED": False, "HAS_BIAS": False, "NUM_SQUARES": 0, **_ENDS[end]}
    return {
        "OUT": out_size, "SIZE": in_size, "SPLITS": ring.splits, "LANES": lanes,
        "SPLIT_SIZE": -(-in_size // (ring.splits * ring.tile_k)) * ring.tile_k,
        "COLUMNS": ring.columns, "TILE_K": ring.tile_k, "STAGES": ring.num_stages,
        "NEXT_FIRST": starts_next_first(out_size * in_size * (1 + bool(ends["GATED"])), lanes),
        "CHAINED": True, **ends,
    }  # fmt: skip


def facts(out_size: int, in_size: int, lanes: int, end: str) -> dict[str, object]:
    """Forms of its global stores, bytes on the stack and in shared memory, and ``_MARKS``."""
    ring = few_rows_ring(out_size, in_size, lanes, gated=bool(_ENDS[end].get("GATED")))
    types = {
        "x_tiles": tiles_type(lanes, ring.tile_k), "w_tiles": tiles_type(ring.tile_n, ring.tile_k),
        "part_ptr": "*fp32", "arrivals_ptr": "*i32", "num_rows": "i32", "squares_ptr": "*fp32",
        "eps": "fp32", "out_ptr": "*fp32" if end == "wide" else "*bf16",
    }  # fmt: skip
    constants = _constants(ring, out_size, in_size, lanes, end)
    compiled = compile_for_hopper(few_rows_kernel, types, constants, num_warps=ring.num_warps)
    ptx = compiled.asm["ptx"]
    return {
        "stores": sorted(set(re.findall(r"st\.global[.\w]*", ptx))),
        "stack": stack_bytes(compiled),
        "shared": compiled.metadata.shared,
        "order": [_MARKS[mark] for mark in re.findall("|".join(map(re.escape, _MARKS)), ptx)],
    }


if __name__ == "__main__":
    *sizes, end = sys.argv[1:]
    sys.stdout.write(json.dumps(facts(*map(int, sizes), end)) + "\n")
