"""The whole step through graphs that hold operations and no Python: see ``tape``.

What a CUDA graph bakes in, a tape bakes in too: numbers of the host, addresses, constants.
"""

import random
from collections.abc import Iterator
from dataclasses import fields
from operator import eq

import pytest
import torch
from rig import (
    BLOCK_SIZE,
    MAX_LANES,
    MAX_MODEL_LEN,
    chunk,
    decode_alone,
    eager,
    full,
    join,
    make_rig,
    padded,
    tiny_model,
    tokens_of,
)
from tape import Tape, TapeBackend
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.comm.messages import ReplicaPlan
from lockstep.comm.sampling import SamplingParams
from lockstep.worker.attention import reference
from lockstep.worker.forward import ForwardInputs
from lockstep.worker.graphs.errors import CaptureFailed, GraphError
from lockstep.worker.self_check import SelfCheck
from lockstep.worker.state import StepState
from lockstep.worker.step_inputs import StepInputs

SIZES = (6, 4, 2, 1)
PROMPTS = [[5, 17, 3], [44, 9, 9, 61, 2, 80, 33], [12], [90, 1, 2, 3], [60, 61], [8] * 9]
OPTIONS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3},
}


@pytest.fixture(scope="module", autouse=True)
def as_on_cuda() -> Iterator[None]:
    """The longest context is the bound that a graph bakes in, not the one a CPU looks up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_longest_context", lambda metadata: metadata.max_context_len)
        yield


@pytest.fixture(scope="module")
def model(as_on_cuda: None):
    return tiny_model()


class Turns:
    """A rig whose steps are numbered and whose lanes have 16 blocks each."""

    def __init__(self, model, backend: TapeBackend | None = None) -> None:
        width = MAX_MODEL_LEN // BLOCK_SIZE
        self.rig = make_rig(model, num_blocks=1 + MAX_LANES * width, backend=backend)
        self.blocks = [list(range(1 + i * width, 1 + (i + 1) * width)) for i in range(MAX_LANES)]
        self.step_id = self.num_lanes = 0

    def prefill(self, prompts: list[list[int]], **sampling: object) -> list[int | None]:
        """Every prompt in a lane of its own, in place of those before."""
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_MODEL_LEN} | sampling)
        leaves, self.num_lanes = list(range(self.num_lanes)), len(prompts)
        joins = [
            join(lane, self.blocks[lane], num_prompt=len(prompt), sampling=params)
            for lane, prompt in enumerate(prompts)
        ]
        chunks = [chunk(lane, prompt) for lane, prompt in enumerate(prompts)]
        return self._run(eager, ReplicaPlan(len(prompts), leaves, joins=joins, chunks=chunks))

    def replay(self, size: int) -> list[int | None]:
        return self._run(full, ReplicaPlan(self.num_lanes), size)

    def call(self, size: int) -> list[int | None]:
        """The same step without a graph."""
        return self._run(padded, ReplicaPlan(self.num_lanes), size)

    def logits(self) -> Tensor:
        return self.rig.state.logits[: self.num_lanes].clone()

    def _run(self, plan, replica: ReplicaPlan, *size: int) -> list[int | None]:
        self.step_id += 1
        return tokens_of(self.rig.run(plan(self.step_id, replica, *size)))


@pytest.fixture(scope="module")
def taped(model) -> Turns:
    turns = Turns(model, TapeBackend())
    turns.rig.capture(*SIZES)
    return turns


@pytest.fixture(scope="module")
def called(model) -> Turns:
    return Turns(model)


def columns(rows: list[list[int | None]]) -> list[list[int | None]]:
    return [list(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("option", OPTIONS)
def test_replays_in_any_order_are_the_steps_bit_for_bit(taped, called, option: str) -> None:
    for turns in (taped, called):
        turns.prefill(PROMPTS[:2], **OPTIONS[option])
    for size in (4, 2, 6, 4, 2, 4):
        assert taped.replay(size) == called.call(size)
        assert torch.equal(taped.logits(), called.logits()), size


def test_many_different_requests_at_once_keep_their_own_tokens(taped, model) -> None:
    rows = [taped.prefill(PROMPTS)] + [taped.replay(6) for _ in range(11)]
    assert columns(rows) == [decode_alone(model, prompt, 12) for prompt in PROMPTS]


def test_one_context_from_short_to_the_longest(taped, model) -> None:
    prompt, number = PROMPTS[3], MAX_MODEL_LEN - 4
    rows = [taped.prefill([prompt])] + [taped.replay(1) for _ in range(number - 1)]
    assert columns(rows) == [decode_alone(model, prompt, number)]


def test_the_shortest_beside_the_longest_context(taped, model) -> None:
    longest = [(7 * i + 3) % 97 for i in range(MAX_MODEL_LEN - 3)]
    rows = [taped.prefill([[12], longest, [5]])] + [taped.replay(4) for _ in range(2)]
    assert columns(rows) == [decode_alone(model, each, 3) for each in ([12], longest, [5])]


def test_equal_prompts_in_one_batch_give_equal_rows(taped) -> None:
    rows = [taped.prefill([PROMPTS[1]] * 5)] + [taped.replay(6) for _ in range(6)]
    assert all(len(set(row)) == 1 for row in rows)
    logits = taped.logits()
    torch.testing.assert_close(logits, logits[:1].expand_as(logits), rtol=0, atol=1e-5)


def pool_of(turns: Turns) -> Iterator[Tensor]:
    for record in turns.rig.parts.graphs._runner.records.values():
        for tape in record.parts.values():
            yield from tape.pool()


def spoil(tensor: Tensor) -> None:
    if tensor.dtype is torch.bool:
        tensor.logical_not_()
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def test_nothing_depends_on_what_lies_in_the_pool_or_in_lanes_that_are_not_live(
    taped, model
) -> None:
    """A graph makes all of its pool anew, and what runs beside it reads nothing there."""
    state, prompts = taped.rig.state, PROMPTS[:3]
    dead = [tensor[3:] for tensor in (state.last_token, state.num_computed, state.block_table)]
    rows = [taped.prefill(prompts)]
    for turn in range(8):
        for tensor in (*pool_of(taped), *dead, state.logits, state.faults):
            spoil(tensor)
        rows.append(taped.call(5) if turn in (2, 5) else taped.replay(4))
    for tensor in dead:
        tensor.zero_()
    assert columns(rows) == [decode_alone(model, prompt, 9) for prompt in prompts]


def shuffle(state: StepState, rng: random.Random) -> None:
    """Lanes as they might be at any other moment."""
    for lane in range(MAX_LANES):
        state.active[lane], state.samples[lane] = rng.random() < 0.7, rng.random() < 0.8
        state.num_computed[lane] = rng.randrange(MAX_MODEL_LEN)
        state.last_token[lane] = rng.randrange(97)
        state.block_table[lane] = torch.tensor(rng.sample(range(1, 90), 16))


def flat(inputs: ForwardInputs) -> dict[str, object]:
    own, attention = vars_of(inputs), vars_of(inputs.attention)
    return {name: value for name, value in (own | attention).items() if name != "attention"}


def vars_of(made: object) -> dict[str, object]:
    return {field.name: getattr(made, field.name) for field in fields(made)}


@pytest.mark.parametrize("size", [1, 4, 6])
def test_inputs_recorded_once_follow_the_lanes_of_every_step(model, size: int) -> None:
    state, rng, made = make_rig(model).state, random.Random(size), []
    builder = StepInputs(state, BLOCK_SIZE, MAX_MODEL_LEN)
    tape = Tape(lambda: made.append(flat(builder.decode(size))))
    for _ in range(10):
        shuffle(state, rng)
        tape.replay()
        for name, value in flat(builder.decode(size)).items():
            same = torch.equal if isinstance(value, Tensor) else eq
            assert same(made[0][name], value), name


def test_a_step_that_asks_the_device_is_refused_with_size_and_source_line(
    model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asks(metadata) -> int:
        return int(metadata.context_lens.max())

    monkeypatch.setattr(reference, "_longest_context", asks)
    rig = make_rig(model, backend=TapeBackend())
    said = rf"at size 4: HostSync: .* {__file__}:\d+: return int\(metadata"
    with pytest.raises(CaptureFailed, match=said):
        rig.capture(4, 2)
    assert rig.parts.graphs.num_graphs == 0


def test_the_self_check_passes_these_graphs(taped, model) -> None:
    SelfCheck(taped.rig.parts).run(model.config.vocab_size)
    taped.rig.runner.clear()


def test_the_self_check_finds_work_that_the_graph_does_not_hold(model) -> None:
    """As from a kernel on a stream that does not capture: capture says nothing, replays differ."""
    rig = make_rig(model, backend=TapeBackend())

    def stray(hidden: Tensor, out: Tensor) -> Tensor:
        with _disable_current_modes():
            return type(model).logits(model, hidden, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "logits", stray)
        rig.capture(2)
        with pytest.raises(GraphError, match="the graph of size 2 differs from its step"):
            SelfCheck(rig.parts).run(model.config.vocab_size)
