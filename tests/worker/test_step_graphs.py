"""Replayed steps against eager ones, bit for bit, on the host backend (a GPU does the same)."""

from collections.abc import Callable

import pytest
import torch
from rig import Rig, chunk, eager, full, join, make_rig, padded, tiny_model, tokens_of
from torch import Tensor

from lockstep.comm.messages import ReplicaPlan, StepPlan
from lockstep.comm.sampling import SamplingParams
from lockstep.worker.graphs.errors import GraphError, StaleGraphError
from lockstep.worker.self_check import SelfCheck

PROMPTS = [[5, 17, 3], [44, 9, 9, 61, 2, 80, 33], [12]]
BLOCKS = [[1, 2, 3, 4], [39, 38, 37, 36, 35], [10, 20, 30, 5]]
SIZES = (6, 4, 3)
OPTIONS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3},
    "logprobs": {"temperature": 0.8, "logprobs": 2},
}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def started(model, *, captured: bool, **sampling: object) -> Rig:
    rig = make_rig(model)
    if captured:
        rig.capture(*SIZES)
    params = SamplingParams(**{"max_tokens": 64} | sampling)
    joins = [
        join(lane, BLOCKS[lane], num_prompt=len(prompt), sampling=params)
        for lane, prompt in enumerate(PROMPTS)
    ]
    chunks = [chunk(lane, prompt) for lane, prompt in enumerate(PROMPTS)]
    rig.run(eager(0, ReplicaPlan(3, joins=joins, chunks=chunks)))
    return rig


def trace(rig: Rig, plan: Callable[..., StepPlan], size: int) -> list[tuple[list, Tensor]]:
    """(tokens, logits of real lanes) of four steps."""
    rows = []
    for step_id in range(1, 5):
        result = rig.run(plan(step_id, ReplicaPlan(3), size))
        rows.append((tokens_of(result), rig.state.logits[:3].clone()))
    return rows


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_replay_is_the_eager_step_bit_for_bit(model, size: int, option: str) -> None:
    replayed = trace(started(model, captured=True, **OPTIONS[option]), full, size)
    called = trace(started(model, captured=False, **OPTIONS[option]), padded, size)
    for (tokens, logits), (expected, expected_logits) in zip(replayed, called, strict=True):
        assert tokens == expected and None not in tokens
        assert torch.equal(logits, expected_logits)


def test_sizes_in_the_order_x_y_x(model) -> None:
    rig, oracle = started(model, captured=True), started(model, captured=False)
    for step_id, size in enumerate([4, 6, 4, 3, 4], start=1):
        assert rig.run(full(step_id, ReplicaPlan(3), size)).token_ids == (
            oracle.run(padded(step_id, ReplicaPlan(3), size)).token_ids
        )
        assert torch.equal(rig.state.logits[:3], oracle.state.logits[:3])


def test_a_mixed_step_replays_the_tail_and_a_later_decode_goes_on(model) -> None:
    rigs = [started(model, captured=captured) for captured in (True, False)]
    joining = ReplicaPlan(4, joins=[join(3, [7, 8], num_prompt=2)], chunks=[chunk(3, [9, 9])])
    for plan in (eager(1, joining), eager(2, ReplicaPlan(4))):
        one, other = (rig.run(plan) for rig in rigs)
        assert tokens_of(one) == tokens_of(other) and None not in tokens_of(one)


def test_a_size_that_was_not_captured_is_refused(model) -> None:
    rig = started(model, captured=True)
    with pytest.raises(GraphError, match="size 5 was not captured"):
        rig.run(full(1, ReplicaPlan(3), 5))


def test_a_moved_tensor_is_named_before_anything_runs(model) -> None:
    rig = started(model, captured=True)
    rig.state.last_token = rig.state.last_token.clone()
    with pytest.raises(StaleGraphError, match="'last_token' has moved"):
        rig.run(full(1, ReplicaPlan(3), 4))


def test_another_generation_of_the_state_is_refused(model) -> None:
    rig = started(model, captured=True)
    rig.state.generation += 1
    with pytest.raises(StaleGraphError, match="generation 0 .* now 1"):
        rig.run(full(1, ReplicaPlan(3), 4))


def self_check(rig: Rig) -> None:
    SelfCheck(rig.parts).run(rig.model.config.vocab_size)


def test_the_self_check_passes_sound_graphs(model) -> None:
    rig = make_rig(model)
    rig.capture(*SIZES)
    self_check(rig)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda logits, calls: logits * 0 + 1, "differs from its step"),
        (lambda logits, calls: logits + calls, "size 3 differs from its step"),
        (lambda logits, calls: logits.log(), "differs from its step by inf"),
    ],
    ids=["reads a constant", "drifts", "not finite"],
)
def test_the_self_check_fails_a_graph_that_differs(fault, said: str) -> None:
    rig = make_rig(tiny_model())
    rig.capture(*SIZES)
    replay, calls = rig.parts.graphs.body, []

    def faulty(num_lanes: int) -> None:
        replay(num_lanes)
        calls.append(num_lanes)
        rig.state.logits.copy_(fault(rig.state.logits, len(calls)))

    object.__setattr__(rig.parts.graphs, "body", faulty)
    with pytest.raises(GraphError, match=said):
        self_check(rig)


def test_the_self_check_finds_a_graph_that_ignores_its_input(model) -> None:
    rig = make_rig(model)
    rig.capture(3)
    rig.model.model.embed_tokens.weight.data[:] = rig.model.model.embed_tokens.weight.data[:1]
    with pytest.raises(GraphError, match="size 3 gives the same whatever its input"):
        self_check(rig)
