"""Tensors for products of few rows, some of them where all memory around them is NaN."""

import torch
from torch import Tensor

DEVICE = torch.device("cuda")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def weight_of(out_size: int, in_size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Whose products are about as large as what they are of."""
    return (torch.randn(out_size, in_size, device=DEVICE) * in_size**-0.5).to(dtype)


def around(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """NaN, eight more than ``shape`` on each side of the first dimension."""
    first, *others = shape
    return torch.full((first + 16, *others), torch.nan, dtype=dtype, device=DEVICE)


def between_nan(x: Tensor) -> Tensor:
    """``x`` with NaN before its first row, or number, and behind its last."""
    wide = around(*x.shape, dtype=x.dtype)
    wide[8:-8] = x
    return wide[8:-8]


def amid_nan(x: Tensor) -> Tensor:
    """Rows ``x`` with NaN on all sides, so they are strided."""
    wide = around(x.shape[0], x.shape[1] + 16, dtype=x.dtype)
    wide[8:-8, 8:-8] = x
    return wide[8:-8, 8:-8]
