"""RMSNorm over the last dim, alone or with the residual added first. CUDA, Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.kernels.chain import chained, follow


@triton.jit
def _rms_norm_kernel(
    out_ptr, x_ptr, weight_ptr, eps, SIZE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    live = columns < SIZE
    follow(CHAINED, NEXT_FIRST=True)
    x = tl.load(x_ptr + row * ROW + columns, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    normed = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + columns, normed, mask=live)


@triton.jit
def _add_rms_norm_kernel(
    out_ptr, new_residual_ptr, x_ptr, residual_ptr, weight_ptr, eps, SIZE: tl.constexpr,
    X_ROW: tl.constexpr, RESIDUAL_ROW: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    live = columns < SIZE
    follow(CHAINED, NEXT_FIRST=True)
    x = tl.load(x_ptr + row * X_ROW + columns, mask=live, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * RESIDUAL_ROW + columns, mask=live, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=live, other=0.0).to(tl.float32)
    # The norm must see what later layers will see: the sum after rounding.
    total = (x + residual.to(tl.float32)).to(new_residual_ptr.dtype.element_ty)
    tl.store(new_residual_ptr + row * SIZE + columns, total, mask=live)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / SIZE + eps)
    normed = (total * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + columns, normed, mask=live)


def _launch_shape(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256)), **chained()}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, size] -> [rows, size], computed in float32 and rounded once."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        shape = _launch_shape(size)
        _rms_norm_kernel[(rows,)](out, x, weight, eps, SIZE=size, ROW=x.stride(0), **shape)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both [rows, size] and newly allocated."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    new_residual = torch.empty_like(out)
    if rows:
        _add_rms_norm_kernel[(rows,)](
            out, new_residual, x, residual, weight, eps, SIZE=size,
            X_ROW=x.stride(0), RESIDUAL_ROW=residual.stride(0), **_launch_shape(size),
        )  # fmt: skip
    return out, new_residual
