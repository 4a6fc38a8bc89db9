"""Rows of an embedding table, as a link of a decode step's chain of kernels. CUDA, Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.kernels.chain import chained, follow

_MOST_COLUMNS = 1024


# Ids may lie anywhere in a buffer of a step's inputs.
@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _embed_kernel(
    out_ptr, ids_ptr, table_ptr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = columns < SIZE
    follow(CHAINED)
    row = tl.load(ids_ptr + token).to(tl.int64)
    values = tl.load(table_ptr + row * SIZE + columns, mask=live, other=0.0)
    tl.store(out_ptr + token * SIZE + columns, values, mask=live)


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """Rows ``token_ids`` [num_tokens] of contiguous ``table`` [rows, size]; no id is checked."""
    num_tokens, size = token_ids.shape[0], table.shape[1]
    out = torch.empty((num_tokens, size), dtype=table.dtype, device=table.device)
    if num_tokens:
        columns = min(_MOST_COLUMNS, triton.next_power_of_2(size))
        _embed_kernel[(num_tokens, triton.cdiv(size, columns))](
            out, token_ids, table, SIZE=size, COLUMNS=columns, num_warps=4, **chained()
        )
    return out
