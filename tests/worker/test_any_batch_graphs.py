"""Graphs of any batch, in segments and whole, against the same steps called eagerly.

On the host backend and on tapes, which hold operations and no Python (see ``tape``).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from rig import BLOCK_SIZE, Rig, any_batch, chunk, eager, join, make_rig, tiny_model, tokens_of
from tape import TapeBackend

from lockstep.comm.messages import ReplicaPlan
from lockstep.comm.sampling import SamplingParams
from lockstep.worker.attention import reference
from lockstep.worker.attention.registry import ADAPTERS
from lockstep.worker.graphs.dispatch import BatchDescriptor
from lockstep.worker.graphs.errors import GraphError, StaleGraphError
from lockstep.worker.graphs.host import HostBackend
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.self_check import SelfCheck

SIZES = (24, 16, 8, 4)
PROMPTS = [[5, 17, 3], [44, 9, 9, 61, 2, 80, 33], [12], [90, 1, 2, 3], [60, 61]]
BACKENDS = {"host": HostBackend, "tape": TapeBackend}
MODES = [RunMode.PIECEWISE, RunMode.FULL]


@pytest.fixture(scope="module", autouse=True)
def attention_of_any_batch() -> Iterator[None]:
    """One that a whole graph can hold; the longest context is the bound that a graph bakes in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ADAPTERS, "reference", "always_attention:AlwaysAttention")
        patch.setattr(reference, "_longest_context", lambda metadata: metadata.max_context_len)
        yield


@pytest.fixture(scope="module")
def model(attention_of_any_batch: None):
    return tiny_model()


@pytest.fixture(scope="module", params=BACKENDS)
def captured(request: pytest.FixtureRequest, model) -> Rig:
    rig = make_rig(model, num_blocks=61, backend=BACKENDS[request.param]())
    rig.capture(6, 4, split=SIZES, mixed=SIZES)
    return rig


@pytest.fixture
def rig(captured: Rig) -> Iterator[Rig]:
    yield captured
    captured.run(eager(0, ReplicaPlan(0, leaves=list(range(5)))))
    captured.kv.storage.zero_()
    for tensor in captured.parts.graphs._segments.flow.statics().values():
        tensor.zero_()
    captured.runner.clear()


Rows = list[tuple[list, torch.Tensor]]
Plan = Callable[[int, ReplicaPlan, int], object]


def called(step_id: int, replica: ReplicaPlan, size: int) -> object:
    return eager(step_id, replica)


def in_mode(mode: RunMode) -> Plan:
    return lambda step_id, replica, size: any_batch(mode, step_id, replica, size)


def joining(lane: int, prompt: list[int], part: int | None = None, **sampling: object):
    """(join, chunk) of a prompt, or of its first ``part`` tokens."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40} | sampling)
    blocks = list(range(1 + 10 * lane, 11 + 10 * lane))
    entry = join(lane, blocks, num_prompt=len(prompt), sampling=params)
    return entry, chunk(lane, prompt[:part], samples=part is None)


def traffic(**sampling: object) -> list[tuple[ReplicaPlan, int]]:
    """Steps with the size that holds each: prompts, chunks beside decodes, idle lanes, decodes."""
    (a, b, c, d, e) = (joining(lane, prompt, **sampling) for lane, prompt in enumerate(PROMPTS))
    late, first = joining(4, PROMPTS[1], 3, **sampling)
    return [
        (ReplicaPlan(2, joins=[a[0], b[0]], chunks=[a[1], b[1]]), 16),
        (ReplicaPlan(3, joins=[c[0]], chunks=[c[1]]), 4),
        (ReplicaPlan(4, joins=[d[0]], chunks=[d[1]], idle_lanes=[1]), 8),
        (ReplicaPlan(4), 4),
        (ReplicaPlan(4), 8),
        (ReplicaPlan(5, joins=[late], chunks=[first]), 24),
        (ReplicaPlan(5, chunks=[chunk(4, PROMPTS[1][3:])], idle_lanes=[0, 2]), 8),
        (ReplicaPlan(5), 16),
        (ReplicaPlan(5, leaves=[4], joins=[e[0]], chunks=[e[1]]), 8),
        (ReplicaPlan(5), 24),
    ]


def run(rig: Rig, plan: Plan, steps: list[tuple[ReplicaPlan, int]]) -> Rows:
    """(tokens, logits of the lanes that sampled) of each step."""
    rows = []
    for step_id, (replica, size) in enumerate(steps):
        result = rig.run(plan(step_id, replica, size))
        sampled = [lane for lane, token in enumerate(tokens_of(result)) if token is not None]
        rows.append((tokens_of(result), rig.state.logits[sampled].clone()))
    return rows


def assert_equal(found: Rows, wanted: Rows) -> None:
    for (tokens, logits), (expected, expected_logits) in zip(found, wanted, strict=True):
        assert tokens == expected
        # Products of more rows may be summed in another order.
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-4)


OPTIONS = {
    "greedy": {},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3},
    "logprobs": {"temperature": 0.8, "logprobs": 2},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_mixed_traffic_gives_the_tokens_of_eager_steps(rig, model, mode, option) -> None:
    wanted = run(make_rig(model, num_blocks=61), called, traffic(**OPTIONS[option]))
    assert_equal(run(rig, in_mode(mode), traffic(**OPTIONS[option])), wanted)
    assert any(len(set(tokens)) > 2 for tokens, _ in wanted)


@pytest.mark.parametrize("mode", MODES)
def test_sizes_in_the_order_x_y_x(rig, model, mode) -> None:
    sizes = [16, 24, 16, 8, 16]
    prefill = traffic()[0]
    steps = [prefill, *((ReplicaPlan(2), size) for size in sizes)]
    wanted = run(make_rig(model, num_blocks=61), called, steps)
    assert_equal(run(rig, in_mode(mode), steps), wanted)


@pytest.mark.parametrize("mode", MODES)
def test_dead_slots_and_earlier_steps_leave_no_trace(rig, model, mode) -> None:
    """NaN in every slot that no live context holds, and wherever segments leave something."""
    wanted = run(make_rig(model, num_blocks=61), called, traffic())
    rig.kv.storage[1:].fill_(float("nan"))
    found = []
    for step_id, (replica, size) in enumerate(traffic()):
        flow = rig.parts.graphs._segments.flow
        for tensor in (flow.heads, flow.attended, flow.residual, flow.hidden):
            tensor.fill_(float("nan"))
        found += run(rig, lambda _, *args, at=step_id: in_mode(mode)(at, *args), [(replica, size)])
        assert mode is RunMode.FULL or flow.hidden[:size].isfinite().all(), "padding rows too"
    assert_equal(found, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_padding_touches_only_the_scheduled_slots(rig, mode) -> None:
    run(rig, called, traffic()[:1])
    before = rig.kv.storage.clone()
    rig.run(in_mode(mode)(1, ReplicaPlan(2), 24))
    changed = (rig.kv.storage != before).flatten(4).any(-1).any(1).any(1)
    places = {(1 + 10 * lane + at // BLOCK_SIZE, at % BLOCK_SIZE) for lane, at in ((0, 3), (1, 7))}
    assert {tuple(place) for place in changed[1:].nonzero().tolist()} == {
        (block - 1, offset) for block, offset in places
    }


@pytest.mark.parametrize("mode", MODES)
def test_a_replica_without_lanes_runs_the_step_on_the_padding_block(rig, mode) -> None:
    before = rig.kv.storage[1:].clone()
    for step_id in range(3):
        assert tokens_of(rig.run(in_mode(mode)(step_id, ReplicaPlan(0), 8))) == []
    assert torch.equal(rig.kv.storage[1:], before)


def test_segments_are_replayed_and_only_attention_is_called(rig, model, monkeypatch) -> None:
    attended: list[int] = []
    attend = type(model).attend

    def counted(self, index, flow, metadata, kv) -> None:
        attended.append(index)
        attend(self, index, flow, metadata, kv)

    monkeypatch.setattr(type(model), "attend", counted)
    replays = rig.parts.graphs._runner.records[BatchDescriptor(8, None, 0)].num_replays
    before = dict(replays)
    run(rig, called, traffic()[:1])
    rig.run(in_mode(RunMode.PIECEWISE)(1, ReplicaPlan(2), 8))
    assert attended == [0, 1]
    assert {name: replays[name] - before[name] for name in replays} == {
        "segment 0": 1, "segment 1": 1, "segment 2": 1,
    }  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_a_size_that_was_not_captured_is_refused(rig, mode) -> None:
    with pytest.raises(GraphError, match="of size 9 .* was not captured"):
        rig.run(in_mode(mode)(0, ReplicaPlan(1), 9))


def test_without_segments_a_step_of_them_is_refused(model) -> None:
    rig = make_rig(model)
    rig.capture(4)
    with pytest.raises(GraphError, match="size 8 was not captured in segments"):
        rig.run(in_mode(RunMode.PIECEWISE)(0, ReplicaPlan(1), 8))


@pytest.mark.parametrize("moved", ["heads", "residual", "token_ids"])
def test_a_moved_tensor_between_segments_is_named_before_anything_runs(model, moved: str) -> None:
    rig = make_rig(model)
    rig.capture(split=(8,))
    segments = rig.parts.graphs._segments
    segments.flow = replace(segments.flow, **{moved: getattr(segments.flow, moved).clone()})
    before = rig.kv.storage.clone()
    with pytest.raises(StaleGraphError, match=f"'flow_{moved}' has moved"):
        rig.run(in_mode(RunMode.PIECEWISE)(0, ReplicaPlan(1), 8))
    assert torch.equal(rig.kv.storage, before)


def test_the_self_check_passes_these_graphs(rig, model) -> None:
    SelfCheck(rig.parts).run(model.config.vocab_size)


@pytest.mark.parametrize("kind", ["mixed", "split"])
def test_the_self_check_names_the_graph_that_differs(kind: str) -> None:
    rig = make_rig(tiny_model())
    rig.capture(**{kind: (4,)})
    name = {"mixed": "mixed_body", "split": "pieces"}[kind]
    replay = getattr(rig.parts.graphs, name)

    def faulty(*args: object) -> None:
        replay(*args)
        rig.state.logits.add_(torch.randn(rig.state.logits.shape))

    setattr(rig.parts.graphs, name, faulty)
    with pytest.raises(GraphError, match="size 4 differs from its step"):
        SelfCheck(rig.parts).run(rig.model.config.vocab_size)


@pytest.mark.parametrize("mode", MODES)
def test_tails_are_replayed_where_no_graph_is_of_decode_steps(model, mode) -> None:
    rig = make_rig(model, num_blocks=61, backend=TapeBackend())
    rig.capture(**{"split" if mode is RunMode.PIECEWISE else "mixed": SIZES})
    options = OPTIONS["filtered"]
    wanted = run(make_rig(model, num_blocks=61), called, traffic(**options))
    assert_equal(run(rig, in_mode(mode), traffic(**options)), wanted)
    replays = [
        number
        for record in rig.parts.graphs._runner.records.values()
        for part, number in record.num_replays.items()
        if part == "tail FILTERED"
    ]
    assert sum(replays) == len(traffic())
