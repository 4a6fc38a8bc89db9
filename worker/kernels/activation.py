"""silu(gate) * up. CUDA, Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.kernels.chain import chained, follow

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(
    out_ptr,
    gate_up_ptr,
    SIZE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    ROW_PROGRAMS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    # Programs that run together read and write whole rows.
    row = (tl.program_id(0) // ROW_PROGRAMS).to(tl.int64)
    columns = tl.program_id(0) % ROW_PROGRAMS * BLOCK + tl.arange(0, BLOCK)
    live = columns < SIZE
    follow(CHAINED)
    gate = tl.load(gate_up_ptr + row * ROW + columns, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * ROW + SIZE + columns, mask=live, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * SIZE + columns, product.to(out_ptr.dtype.element_ty), mask=live)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up [rows, 2 * size], gate first -> [rows, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _silu_and_mul_kernel[(rows * triton.cdiv(size, _BLOCK),)](
            out, gate_up, SIZE=size, ROW=gate_up.stride(0), BLOCK=_BLOCK, **chained()
        )
    return out
