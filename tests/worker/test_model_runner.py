"""Plans in, results out: the rules of a step, each against the slow way to decode."""

import pytest
from rig import (
    MAX_LANES,
    Rig,
    chunk,
    decode_alone,
    eager,
    grant,
    join,
    make_rig,
    tiny_model,
    tokens_of,
)

from lockstep.comm.messages import ReplicaPlan

PROMPTS = [[5, 17, 3], [44, 9, 9, 61, 2, 80, 33], [12]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    return [decode_alone(model, prompt, 12) for prompt in PROMPTS]


def blocks_of(lane: int) -> list[int]:
    """Six blocks a lane, so that positions 0 to 23 are granted from the start."""
    return list(range(1 + 6 * lane, 7 + 6 * lane))


def start(rig: Rig) -> list[list[int]]:
    """Prefill all prompts in one step; the tokens so far, per lane."""
    joins = [join(lane, blocks_of(lane), num_prompt=len(p)) for lane, p in enumerate(PROMPTS)]
    chunks = [chunk(lane, p) for lane, p in enumerate(PROMPTS)]
    result = rig.run(eager(0, ReplicaPlan(len(PROMPTS), joins=joins, chunks=chunks)))
    return [[token] for token in tokens_of(result)]


def test_prefill_and_decode_give_the_tokens_of_each_request_alone(model, alone) -> None:
    rig = make_rig(model)
    made = start(rig)
    for step_id in range(1, 12):
        for lane, token in enumerate(tokens_of(rig.run(eager(step_id, ReplicaPlan(3))))):
            made[lane].append(token)
    assert made == alone


def test_prompt_in_chunks_beside_decoding_lanes(model, alone) -> None:
    rig = make_rig(model)
    short, long = PROMPTS[0], PROMPTS[1]
    first = ReplicaPlan(1, joins=[join(0, blocks_of(0), num_prompt=3)], chunks=[chunk(0, short)])
    made = [tokens_of(rig.run(eager(0, first)))[0]]
    joining = ReplicaPlan(
        2, joins=[join(1, [7], num_prompt=7)], chunks=[chunk(1, long[:3], samples=False)]
    )
    result = tokens_of(rig.run(eager(1, joining)))
    assert result[1] is None
    made.append(result[0])
    going_on = ReplicaPlan(2, new_blocks=[grant(1, [8])], chunks=[chunk(1, long[3:])])
    result = tokens_of(rig.run(eager(2, going_on)))
    assert [*made, result[0]] == alone[0][:3]
    assert result[1] == alone[1][0]


def test_idle_lanes_compute_nothing_and_go_on_unharmed(model, alone) -> None:
    rig = make_rig(model)
    made = start(rig)
    for step_id in range(1, 6):
        idle = [step_id % 3]
        result = tokens_of(rig.run(eager(step_id, ReplicaPlan(3, idle_lanes=idle))))
        assert [lane for lane, token in enumerate(result) if token is None] == idle
        for lane, token in enumerate(result):
            made[lane] += [] if token is None else [token]
    for lane in range(3):
        assert made[lane] == alone[lane][: len(made[lane])]


def test_several_steps_of_one_grant(model, alone) -> None:
    rig = make_rig(model)
    made = start(rig)
    pending = list(rig.runner.launch(eager(1, ReplicaPlan(3), num_steps=4)))
    results = [p.result() for p in pending]
    assert [r.step_id for r in results] == [1, 2, 3, 4]
    for result in results:
        for lane, token in enumerate(tokens_of(result)):
            made[lane].append(token)
    assert made == [tokens[:5] for tokens in alone]


def test_lanes_are_compacted_by_a_device_move(model, alone) -> None:
    rig = make_rig(model)
    start(rig)
    moved = ReplicaPlan(2, leaves=[0], moves=[(2, 0)])
    result = tokens_of(rig.run(eager(1, moved)))
    assert result == [alone[2][1], alone[1][1]]
    assert tokens_of(rig.run(eager(2, ReplicaPlan(2)))) == [alone[2][2], alone[1][2]]
    assert not rig.state.active[2:].any() and rig.state.block_table[2:].eq(0).all()


def test_a_result_is_read_by_the_lanes_of_its_own_step(model, alone) -> None:
    rig = make_rig(model)
    start(rig)
    [before] = rig.runner.launch(eager(1, ReplicaPlan(3)))
    [after] = rig.runner.launch(eager(2, ReplicaPlan(1, leaves=[0, 1], moves=[(2, 0)])))
    assert tokens_of(before.result()) == [tokens[1] for tokens in alone]
    assert tokens_of(after.result()) == [alone[2][2]]


def test_a_joining_request_does_not_see_its_lane_s_last_tenant(model, alone) -> None:
    rig = make_rig(model)
    start(rig)
    swap = ReplicaPlan(
        3,
        leaves=[1],
        joins=[join(1, [30, 31], num_prompt=1)],
        chunks=[chunk(1, PROMPTS[2])],
    )
    result = tokens_of(rig.run(eager(1, swap)))
    assert result == [alone[0][1], alone[2][0], alone[2][1]]
    assert rig.state.block_table[1].tolist()[:3] == [30, 31, 0]


def test_more_lanes_than_rows_are_refused() -> None:
    rig = make_rig()
    too_long = ReplicaPlan(1, joins=[join(0, list(range(1, 18)))], chunks=[chunk(0, [1])])
    with pytest.raises(ValueError, match="lane 0 would own 17 blocks, at most 16 fit"):
        rig.run(eager(0, too_long))
    assert MAX_LANES == rig.state.max_lanes
