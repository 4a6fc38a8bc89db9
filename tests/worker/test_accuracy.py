"""When an engine's answers count as those of its model, and when not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inline import request, serve, worker_config
from msgspec import structs
from torch import Tensor

from lockstep.comm.messages import TokenLogprobs
from lockstep.worker.accuracy import Accuracy, compare, sure_positions
from lockstep.worker.config import WorkerConfig
from lockstep.worker.judge import Answer, judge, judge_by, open_whole
from lockstep.worker.weights.source import TensorSource

CPU = torch.device("cpu")
PROMPTS = ([3, 5, 8, 13], [60, 2, 9, 1])
FINE = Accuracy(
    num_positions=64, num_sure=9, num_agreed=9, rms=0.3, plain_rms=0.25, most=1.5, plain_most=1.0
)


def test_what_passes() -> None:
    assert FINE.passed
    for worse in ({"num_agreed": 8}, {"rms": 0.4}, {"most": 2.1}, {"rms": math.nan}):
        assert not structs.replace(FINE, **worse).passed


floats = st.floats(-8, 8, width=32)


@given(st.lists(st.tuples(floats, floats, floats, floats), min_size=1, max_size=6))
def test_a_sure_token_survives_any_error_as_large_as_the_plain_one(rows: list) -> None:
    truth = torch.tensor([row[:3] for row in rows])
    plain = truth + torch.tensor([[row[3], 0.0, 0.0] for row in rows])
    sure = sure_positions(truth, plain)
    for row, (logits, error) in enumerate(zip(truth, (plain - truth).abs().amax(1), strict=True)):
        best = int(logits.argmax())
        worst = logits + error
        worst[best] -= 2 * error
        assert not sure[row] or int(worst.argmax()) == best
        gap = logits.sort(descending=True).values
        assert bool(sure[row]) == bool(gap[0] - gap[1] > 2 * error)


@given(st.lists(floats, min_size=4, max_size=4), st.lists(st.booleans(), min_size=2, max_size=2))
def test_errors_are_summed_up(errors: list[float], right: list[bool]) -> None:
    ours, sure = torch.tensor(errors).view(2, 2), torch.tensor([True, False])
    found = compare(ours, 2 * ours, sure, torch.tensor(right))
    assert found.rms == pytest.approx(math.sqrt(sum(e * e for e in errors) / 4), abs=1e-12)
    assert (found.plain_rms, found.plain_most) == (2 * found.rms, 2 * found.most)
    assert found.most == max(map(abs, errors))
    assert (found.num_positions, found.num_sure, found.num_agreed) == (2, 1, int(right[0]))


@pytest.fixture(scope="module")
def served() -> tuple[WorkerConfig, list[Answer]]:
    config = worker_config(graph_mode="FULL_AND_PIECEWISE")
    requests = [
        request(f"r{i}", prompt, max_tokens=12, logprobs=20) for i, prompt in enumerate(PROMPTS)
    ]
    answers, _, _ = serve(config, requests)
    return config, [
        answer_of(prompt, answers.tokens[f"r{i}"], answers.logprobs[f"r{i}"])
        for i, prompt in enumerate(PROMPTS)
    ]


def answer_of(prompt: list[int], token_ids: list[int], told: list[TokenLogprobs]) -> Answer:
    ids, logprobs = [each.top_ids for each in told], [each.top_logprobs for each in told]
    return Answer(prompt, token_ids, ids, logprobs)


def test_served_answers_are_those_of_the_model(served) -> None:
    config, answers = served
    found = judge(config, "cpu", answers)
    assert all(each.passed for each in found), found
    assert all(each.num_sure == each.num_positions == 12 for each in found)


class OneChanged:
    """A source with one number of one tensor changed."""

    def __init__(self, source: TensorSource, name: str) -> None:
        self._source, self._name = source, name

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, dim: int, start: int, length: int) -> Tensor:
        tensor = self._source.read(name, dim, start, length)
        if name == self._name:
            tensor.view(-1)[0] += 0.01
        return tensor


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"]
)
def test_one_changed_number_of_one_weight_is_seen(served, name: str) -> None:
    config, answers = served
    changed = OneChanged(open_whole(config, CPU), name)
    assert not any(each.passed for each in judge_by(changed, config, "cpu", answers))


def test_one_wrong_token_is_seen(served) -> None:
    config, answers = served
    wrong = (answers[0].token_ids[-1] + 1) % config.model.vocab_size
    last = structs.replace(answers[0], token_ids=[*answers[0].token_ids[:-1], wrong])
    first, second = judge(config, "cpu", [last, answers[1]])
    assert (first.num_sure, first.num_agreed) == (12, 11)
    assert not first.passed and second.passed
