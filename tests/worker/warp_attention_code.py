"""Compiles attention by warps for Hopper, which takes no GPU, and prints what its code does.

python tests/worker/warp_attention_code.py NUM_HEADS NUM_KV_HEADS HEAD_DIM NUM_WARPS KEY_SLOTS

Prints JSON.
"""

import json
import re
import sys

import triton
from hopper import compile_for_hopper, registers, stack_bytes

from lockstep.worker.kernels.warp_attention_kernel import warp_attention_kernel

_TYPES = {
    **dict.fromkeys(("scale_log2", "eps"), "fp32"),
    **dict.fromkeys(("window", "table_row"), "i32"),
    **dict.fromkeys(("context_lens_ptr", "block_table_ptr", "arrivals_ptr"), "*i32"),
    **dict.fromkeys(("part_max_ptr", "part_sum_ptr", "part_acc_ptr", "cos_sin_ptr"), "*fp32"),
    "slots_ptr": "*i64",
}
# What a thread does, in order, of what the order matters of.
_MARKS = {
    "cp.async.cg": "ask",
    "cp.async.wait_group": "copied",
    "griddepcontrol.wait": "wait",
    "griddepcontrol.launch_dependents": "let next start",
    ".trans.shared": "load values",
    "bar.sync": "meet",
    "st.shared": "keep",
    "st.global": "store",
    "atom.global": "arrive",
}


def facts(
    num_heads: int, num_kv_heads: int, head_dim: int, num_warps: int, key_slots: int
) -> dict[str, object]:
    """Registers, bytes on the stack and in shared memory, and ``_MARKS``."""
    group, width = num_heads // num_kv_heads, (num_heads + 2 * num_kv_heads) * head_dim
    fixed = {
        **dict.fromkeys(("Q_ROW", "K_ROW", "V_ROW"), width), "OUT_ROW": num_heads * head_dim,
        "BLOCKS": (16, 64 * 16 * num_kv_heads, num_kv_heads, 1), "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group, "HEADS": max(8, triton.next_power_of_2(group)), "HEAD_DIM": head_dim,
        "KEY_SLOTS": key_slots, "NORM": True, "CHAINED": True,
    }  # fmt: skip
    compiled = compile_for_hopper(warp_attention_kernel, _TYPES, fixed, num_warps=num_warps)
    ptx = compiled.asm["ptx"]
    return {
        "registers": registers(compiled),
        "stack": stack_bytes(compiled),
        "shared": compiled.metadata.shared,
        "copies": sorted(set(re.findall(r"cp\.async\.cg.*(, 0x10, %)", ptx))),
        "order": [_MARKS[mark] for mark in re.findall("|".join(map(re.escape, _MARKS)), ptx)],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts(*map(int, sys.argv[1:]))) + "\n")
