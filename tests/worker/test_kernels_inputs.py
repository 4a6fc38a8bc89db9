"""The inputs of a decode step in one kernel against the torch ones, from random states."""

import pytest
import torch
from compilations import compilations
from kernel_device import kernel_device, kernel_marks

DEVICE = kernel_device()

from lockstep.worker.state import StepState  # noqa: E402
from lockstep.worker.step_inputs import StepInputs  # noqa: E402

pytestmark = kernel_marks()
MAX_LANES, WIDTH, BLOCK_SIZE, VOCAB = 7, 5, 16, 11


def _random_state(seed: int) -> StepState:
    torch.manual_seed(seed)
    state = StepState(
        max_lanes=MAX_LANES, max_tokens=8, max_blocks_per_req=WIDTH, vocab_local=VOCAB,
        ring_depth=4, num_replicas=2, device=DEVICE,
    )  # fmt: skip
    state.last_token.copy_(torch.randint(0, VOCAB, (MAX_LANES,)))
    state.num_computed.copy_(torch.randint(0, WIDTH * BLOCK_SIZE, (MAX_LANES,)))
    state.active.copy_(torch.rand(MAX_LANES) < 0.7)
    state.samples.copy_(torch.rand(MAX_LANES) < 0.7)
    state.block_table.copy_(torch.randint(0, 4, (MAX_LANES, WIDTH)))
    state.faults.copy_(torch.rand(MAX_LANES) < 0.3)
    return state


@pytest.mark.parametrize("num_lanes", [1, 5, MAX_LANES])
@pytest.mark.parametrize("seed", range(4))
def test_inputs_are_those_of_torch(seed: int, num_lanes: int) -> None:
    state, other = _random_state(seed), _random_state(seed)
    *got, _ = StepInputs(state, BLOCK_SIZE, 80)._decode_in_one_kernel(num_lanes)
    *expected, table = StepInputs(other, BLOCK_SIZE, 80)._decode_in_torch(num_lanes)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.equal(theirs)
    for name, tensor in other.statics().items():
        torch.testing.assert_close(
            state.statics()[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name
        )


def test_a_live_lane_beyond_its_table_is_a_fault_and_reads_no_further() -> None:
    state = _random_state(0)
    state.active.fill_(True)
    state.samples.fill_(True)
    state.block_table.fill_(3)
    state.num_computed.fill_(WIDTH * BLOCK_SIZE)
    state.num_computed[1] = 0
    *_, slots, contexts, _ = StepInputs(state, BLOCK_SIZE, 80)._decode_in_one_kernel(MAX_LANES)
    assert state.faults.tolist() == [1, 0, 1, 1, 1, 1, 1]
    assert slots.tolist() == [0, 3 * BLOCK_SIZE] + [0] * 5
    assert contexts.tolist() == [81, 1] + [81] * 5


@pytest.mark.gpu
def test_every_number_of_lanes_uses_one_kernel() -> None:
    inputs = StepInputs(_random_state(0), block_size=32, max_model_len=160)
    with compilations() as at_start:
        inputs.decode(2)
    assert len(at_start) == 1
    with compilations() as later:
        for num_lanes in range(1, MAX_LANES + 1):
            inputs.decode(num_lanes)
    assert later == []
