"""The rules that make self-advancing decode safe, each broken if the step were careless."""

import pytest
import torch
from rig import (
    BLOCK_SIZE,
    GREEDY,
    MAX_MODEL_LEN,
    Rig,
    chunk,
    decode_alone,
    eager,
    grant,
    join,
    make_rig,
    padded,
    tiny_model,
    tokens_of,
)
from torch import Tensor

from lockstep.comm.collectives import Communicator
from lockstep.comm.errors import RankMismatch
from lockstep.comm.messages import ReplicaPlan
from lockstep.comm.sampling import SamplingParams
from lockstep.worker.results import SlotFault
from lockstep.worker.step_inputs import StepInputs

PROMPTS = [[5, 17, 3], [44, 9, 9, 61, 2, 80, 33], [12]]
NUM_BLOCKS = 40
BLOCKS = [[1, 2, 3, 4], [39, 38, 37, 36, 35], [10, 20, 30, 5]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    return [decode_alone(model, prompt, 12) for prompt in PROMPTS]


def start(rig: Rig, **options: object) -> list[int | None]:
    joins = [
        join(lane, BLOCKS[lane], num_prompt=len(prompt), **options)
        for lane, prompt in enumerate(PROMPTS)
    ]
    chunks = [chunk(lane, prompt) for lane, prompt in enumerate(PROMPTS)]
    return tokens_of(rig.run(eager(0, ReplicaPlan(3, joins=joins, chunks=chunks))))


def lane_state(rig: Rig) -> dict[str, Tensor]:
    """All that lanes are made of, and all blocks but the padding block."""
    plan_and_output = {
        "query_lens", "samples", "logits", "faults", "output_ring", "output_counter", "step_number"
    }  # fmt: skip
    statics = rig.state.statics() | rig.sampling.statics()
    kept = {name: tensor for name, tensor in statics.items() if name not in plan_and_output}
    return {name: tensor.clone() for name, tensor in kept.items()} | {
        "blocks": rig.kv.storage[1:].clone()
    }


def assert_unchanged(rig: Rig, before: dict[str, Tensor]) -> None:
    for name, tensor in lane_state(rig).items():
        assert torch.equal(tensor, before[name]), f"{name} changed"


@pytest.mark.parametrize(
    "replica",
    [ReplicaPlan(3, idle_lanes=[0, 1, 2]), ReplicaPlan(0)],
    ids=["all lanes idle", "dummy step"],
)
def test_a_step_of_zero_counts_changes_nothing_but_the_padding_block(model, replica) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS)
    start(rig)
    before = lane_state(rig)
    for step_id in range(1, 6):
        result = rig.run(padded(step_id, replica, 4))
        assert tokens_of(result) == [None] * replica.num_lanes
    assert_unchanged(rig, before)


def test_lanes_that_all_ended_change_nothing_either(model, alone) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS)
    start(rig, stop_ids=[tokens[0] for tokens in alone])
    before = lane_state(rig)
    assert tokens_of(rig.run(padded(1, ReplicaPlan(3), 4))) == [None] * 3
    assert_unchanged(rig, before)


@pytest.mark.parametrize("form", ["decode", "mixed"])
def test_a_live_lane_whose_slot_falls_into_block_0_stops_the_worker(model, form: str) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS)
    joins = [join(0, [1], num_prompt=4), join(1, [2, 3], num_prompt=4)]
    rig.run(eager(0, ReplicaPlan(2, joins=joins, chunks=[chunk(0, [1] * 4), chunk(1, [2] * 4)])))
    if form == "decode":
        over = eager(1, ReplicaPlan(2))
    else:
        joining = {"joins": [join(2, [4], num_prompt=1)], "chunks": [chunk(2, [3])]}
        over = eager(1, ReplicaPlan(3, **joining))
    with pytest.raises(SlotFault, match=r"step 1: lanes \[0\] wrote to the padding block"):
        rig.run(over)


def test_outputs_of_an_ended_lane_count_0_until_it_leaves(model, alone) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS)
    made = [start(rig, stop_ids=[alone[1][2]])]
    made += [tokens_of(rig.run(eager(step_id, ReplicaPlan(3)))) for step_id in range(1, 6)]
    assert [row[1] for row in made] == [*alone[1][:3], None, None, None]
    for lane in (0, 2):
        stop = alone[1][2]
        own = alone[lane][:6]
        ended = own.index(stop) + 1 if stop in own else 6
        assert [row[lane] for row in made][:ended] == own[:ended]


def test_stop_ids_do_not_count_before_min_tokens(model, alone) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS)
    sampling = SamplingParams(temperature=0.0, min_tokens=5, max_tokens=64)
    made = [start(rig, stop_ids=[alone[0][1]], sampling=sampling)]
    made += [tokens_of(rig.run(eager(step_id, ReplicaPlan(3)))) for step_id in range(1, 5)]
    assert all(token is not None for row in made for token in row)
    assert alone[0][1] not in [row[0] for row in made]


def live_slots(rig: Rig, lens: list[int]) -> Tensor:
    """[num_blocks, block_size] bool: slots that hold a token of a live context."""
    live = torch.zeros(rig.kv.num_blocks, BLOCK_SIZE, dtype=torch.bool)
    for blocks, length in zip(BLOCKS, lens, strict=True):
        for position in range(length):
            live[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    return live


def test_tokens_do_not_change_when_every_dead_slot_holds_nan(model, alone) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS)
    rig.kv.storage.fill_(float("nan"))
    made = [start(rig)]
    for step_id in range(1, 9):
        lens = [len(prompt) + step_id - 1 for prompt in PROMPTS]
        dead = ~live_slots(rig, lens)
        rig.kv.storage.masked_fill_(dead[:, None, None, :, None, None], float("nan"))
        made.append(tokens_of(rig.run(padded(step_id, ReplicaPlan(3), 5))))
    assert [list(column) for column in zip(*made, strict=True)] == [row[:9] for row in alone]


def test_a_padded_step_touches_only_the_scheduled_slots(model) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS)
    start(rig)
    for step_id in range(1, 5):
        before = rig.kv.storage.clone()
        rig.run(padded(step_id, ReplicaPlan(3, idle_lanes=[1]), 6))
        changed = (rig.kv.storage != before).flatten(4).any(-1).any(1).any(1)
        expected = torch.zeros_like(changed)
        for lane in (0, 2):
            position = len(PROMPTS[lane]) + step_id - 1
            block = BLOCKS[lane][position // BLOCK_SIZE]
            expected[block, position % BLOCK_SIZE] = True
        assert torch.equal(changed[1:], expected[1:])


def test_the_top_blocks_of_a_full_pool_work(model, alone) -> None:
    rig = make_rig(model, num_blocks=13)
    joins = [join(lane, [12 - 4 * lane, 11 - 4 * lane], num_prompt=3) for lane in range(3)]
    chunks = [chunk(lane, PROMPTS[0]) for lane in range(3)]
    made = [tokens_of(rig.run(eager(0, ReplicaPlan(3, joins=joins, chunks=chunks))))]
    granted = [grant(lane, [10 - 4 * lane, 9 - 4 * lane]) for lane in range(3)]
    made += [tokens_of(rig.run(eager(1, ReplicaPlan(3, new_blocks=granted))))]
    made += [tokens_of(rig.run(eager(step_id, ReplicaPlan(3)))) for step_id in range(2, 12)]
    assert made == [[token] * 3 for token in alone[0]]


def test_a_preempted_request_goes_on_where_it_was(model, alone) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS)
    start(rig)
    rig.run(eager(1, ReplicaPlan(3)))
    result = tokens_of(rig.run(eager(2, ReplicaPlan(2, leaves=[0], moves=[(2, 0)]))))
    assert result == [alone[2][2], alone[1][2]]
    back = join(2, [7, 8], num_prompt=3, num_output=2)
    again = ReplicaPlan(3, joins=[back], chunks=[chunk(2, PROMPTS[0] + alone[0][:2])])
    assert tokens_of(rig.run(eager(3, again))) == [alone[2][3], alone[1][3], alone[0][2]]


def test_results_are_kept_for_run_ahead_steps_and_never_overwritten_unread(model) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS, run_ahead=1)
    start(rig)
    unread = [next(rig.runner.launch(eager(i, ReplicaPlan(3)))) for i in range(1, 4)]
    with pytest.raises(AssertionError, match="a result was not read"):
        next(rig.runner.launch(eager(4, ReplicaPlan(3))))
    assert [pending.result().step_id for pending in unread] == [1, 2, 3]


def test_a_lane_with_unusable_logits_is_reported_and_ends_alone(alone) -> None:
    model = tiny_model()
    model.model.embed_tokens.weight.data[96] = float("nan")
    rig = make_rig(model, num_blocks=NUM_BLOCKS)
    joins = [join(lane, BLOCKS[lane], num_prompt=len(PROMPTS[lane])) for lane in range(3)]
    prompts = [PROMPTS[0], [96, *PROMPTS[1][1:]], PROMPTS[2]]
    chunks = [chunk(lane, prompt) for lane, prompt in enumerate(prompts)]
    result = rig.run(eager(0, ReplicaPlan(3, joins=joins, chunks=chunks)))
    assert result.bad_lanes == [1]
    assert tokens_of(result) == [alone[0][0], None, alone[2][0]]
    after = rig.run(eager(1, ReplicaPlan(3)))
    assert after.bad_lanes == [] and tokens_of(after) == [alone[0][1], None, alone[2][1]]


def test_logprobs_come_for_the_lanes_that_asked(model, alone) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS)
    asking = SamplingParams(temperature=0.0, logprobs=2, max_tokens=64)
    joins = [
        join(lane, BLOCKS[lane], num_prompt=len(prompt), sampling=asking if lane == 1 else GREEDY)
        for lane, prompt in enumerate(PROMPTS)
    ]
    chunks = [chunk(lane, prompt) for lane, prompt in enumerate(PROMPTS)]
    result = rig.run(eager(0, ReplicaPlan(3, joins=joins, chunks=chunks)))
    [(lane, logprobs)] = result.logprobs
    assert lane == 1 and logprobs.token_id == alone[1][0] and logprobs.rank == 1
    assert logprobs.top_ids[0] == alone[1][0] and len(logprobs.top_ids) == 2
    assert logprobs.top_logprobs[0] == logprobs.logprob


class StuckPeer(Communicator):
    """Rank 0 of two; rank 1 does not get beyond step 2."""

    def __init__(self) -> None:
        super().__init__(None)
        self.size = 2

    def all_reduce(self, x: Tensor) -> Tensor:
        return x + torch.tensor([0.0, min(float(x[0]), 2.0)])


def test_replicas_at_different_steps_find_out_in_the_step_itself(model) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS, dp=StuckPeer())
    start(rig)
    for step_id in (1, 2):
        rig.run(eager(step_id, ReplicaPlan(3)))
    with pytest.raises(RankMismatch, match="step 3: replica 1 of the lockstep group is not"):
        rig.run(eager(3, ReplicaPlan(3)))


def test_lanes_that_are_not_live_are_a_dummy_request_on_block_0(model) -> None:
    rig = make_rig(model, num_blocks=NUM_BLOCKS)
    start(rig)
    rig.run(padded(1, ReplicaPlan(3, idle_lanes=[1]), 6))
    inputs = StepInputs(rig.state, BLOCK_SIZE, MAX_MODEL_LEN).decode(6)
    attention = inputs.attention
    for row in (1, 3, 4, 5):
        assert inputs.token_ids[row] == inputs.positions[row] == attention.slots[row] == 0
        assert attention.context_lens[row] == 1 and attention.block_table[row].eq(0).all()
    assert inputs.positions[[0, 2]].tolist() == [4, 2]
    assert attention.context_lens[[0, 2]].tolist() == [5, 3]
    assert attention.slots[[0, 2]].tolist() == [2 * BLOCK_SIZE, 10 * BLOCK_SIZE + 2]
