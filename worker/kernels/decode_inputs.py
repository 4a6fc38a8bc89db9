"""The inputs of a decode step in one kernel. CUDA, Triton.

``worker.step_inputs`` has the same in a dozen torch operations, which it is tested against.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.worker.kernels.chain import chained, follow
from lockstep.worker.state import StepState

_LANES = 128


@triton.jit(do_not_specialize=["num_lanes"])
def _decode_inputs_kernel(
    token_ids_ptr, positions_ptr, slots_ptr, context_lens_ptr, faults_ptr, active_ptr,
    samples_ptr, num_computed_ptr, last_token_ptr, block_table_ptr, num_lanes,
    TABLE_ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, LANES: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    follow(CHAINED)
    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    present = lanes < num_lanes
    active = tl.load(active_ptr + lanes, mask=present, other=0) != 0
    samples = tl.load(samples_ptr + lanes, mask=present, other=0) != 0
    live = active & samples
    # A dummy lane stands at position 0 of the padding block.
    position = tl.load(num_computed_ptr + lanes, mask=live, other=0)
    place = position // BLOCK_SIZE
    cell = block_table_ptr + lanes.to(tl.int64) * TABLE_ROW + place
    block = tl.load(cell, mask=live & (place < TABLE_ROW), other=0).to(tl.int64)
    token = tl.load(last_token_ptr + lanes, mask=live, other=0)
    tl.store(token_ids_ptr + lanes, token, mask=present)
    tl.store(positions_ptr + lanes, position, mask=present)
    tl.store(slots_ptr + lanes, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=present)
    tl.store(context_lens_ptr + lanes, (position + 1).to(tl.int32), mask=present)
    tl.store(faults_ptr + lanes, (live & (block == 0)).to(tl.int32), mask=present)


def decode_inputs(
    state: StepState, num_lanes: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(token_ids, positions, slots: int64, context_lens: int32), each [num_lanes].

    Notes in ``state.faults`` the live lanes without a block for their slot.
    """
    device = state.device
    # Rows of one tensor would be aligned or not by num_lanes, and compiled for either.
    token_ids, positions, slots = (
        torch.empty(num_lanes, dtype=torch.int64, device=device) for _ in range(3)
    )
    context_lens = torch.empty(num_lanes, dtype=torch.int32, device=device)
    _decode_inputs_kernel[(triton.cdiv(num_lanes, _LANES),)](
        token_ids, positions, slots, context_lens, state.faults, state.active,
        state.samples, state.num_computed, state.last_token, state.block_table, num_lanes,
        TABLE_ROW=state.block_table.shape[1], BLOCK_SIZE=block_size, LANES=_LANES,
        **chained(),
    )  # fmt: skip
    return token_ids, positions, slots, context_lens
