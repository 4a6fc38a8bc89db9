"""top_k, top_p, min_p, penalties, biases and min_tokens against their formulae."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_sampling import adjusted_logits, distribution
from sampling_cases import VOCAB, OneRank, join, lane_state, random_logits

from lockstep.comm.sampling import SamplingParams
from lockstep.worker.filters import adjust, cut
from lockstep.worker.sampler import Sampler
from lockstep.worker.sampling_state import Variant

# Few distinct values make ties, many make none; both must be cut alike.
rows = st.one_of(
    st.lists(st.integers(-3, 3).map(float), min_size=8, max_size=8),
    st.lists(st.floats(-20, 20, width=32), min_size=8, max_size=8),
)
cutting = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.01, 1.0),
    min_p=st.just(0.0) | st.floats(0.001, 1.0),
)


def kept(logits, params):
    lanes = lane_state(1, vocab=len(logits))
    lanes.write_rows([join(0, params=params)])
    return cut(torch.tensor([logits]), lanes)[0] > -math.inf


@settings(deadline=None)
@given(logits=rows, params=cutting)
def test_kept_ids_are_the_oracles(logits, params):
    expected = torch.tensor([p > 0 for p in distribution(logits, params)])
    tokens = kept(logits, params)
    if torch.equal(tokens, expected):
        return
    # Only a token on the very edge of min_p or top_p may differ, by rounding.
    edges = [
        distribution(logits, SamplingParams(
            temperature=params.temperature, top_k=params.top_k,
            top_p=min(1.0, params.top_p * (1 + sign * 1e-5)),
            min_p=min(1.0, params.min_p * (1 - sign * 1e-5)),
        ))
        for sign in (-1, 1)
    ]  # fmt: skip
    narrow, wide = (torch.tensor([p > 0 for p in edge]) for edge in edges)
    assert (tokens | ~narrow).all() and (wide | ~tokens).all()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"top_k": 4},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.6, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.5, "frequency_penalty": 0.5, "logit_bias": {3: 4.0}},
    ],
)
def test_draws_follow_the_distribution(sampling):
    params = SamplingParams(**sampling)
    logits = random_logits(1, vocab=24, scale=1.5)
    num_draws = 8192
    lanes = lane_state(num_draws, vocab=24)
    lanes.write_rows([join(lane, seed=lane * 7919, params=params) for lane in range(num_draws)])
    rows = logits.expand(num_draws, -1).contiguous()
    active = torch.ones(num_draws, dtype=torch.bool)
    tokens = Sampler(lanes, OneRank()).sample(rows, active, lanes.variant()).token_ids
    expected = distribution(adjusted_logits(logits[0].tolist(), params, [], []), params)
    assert chi_square(torch.bincount(tokens, minlength=24), expected) < 5


def chi_square(counts, probabilities):
    """Standard deviations of chi-square above its mean; rare ids share a cell."""
    expected = torch.tensor(probabilities, dtype=torch.float64) * counts.sum()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    cells = [*zip(counts[common].tolist(), expected[common].tolist(), strict=True)]
    rare = expected[~common].sum().item()
    if rare >= 5:
        cells.append((counts[~common].sum().item(), rare))
    value = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    return (value - freedom) / math.sqrt(2 * freedom)


@settings(deadline=None)
@given(
    repetition=st.floats(0.1, 3),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=5),
    outputs=st.lists(st.integers(0, 9), max_size=8),
)
def test_penalties_are_the_formulae(repetition, frequency, presence, prompt, outputs):
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    logits = random_logits(1)
    lanes = lane_state(1)
    lanes.write_rows([join(0, num_prompt=len(prompt), params=params)])
    lanes.record_chunk(0, torch.tensor(prompt + outputs, dtype=torch.int64), start=0)
    expected = adjusted_logits(logits[0].tolist(), params, prompt, outputs)
    torch.testing.assert_close(adjust(logits, lanes)[0], torch.tensor(expected))


@settings(deadline=None)
@given(cuts=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_history_does_not_depend_on_how_the_prompt_is_chunked(cuts):
    tokens = torch.arange(8) % 5
    whole, pieces = lane_state(1), lane_state(1)
    for lanes in (whole, pieces):
        lanes.write_rows([join(0, num_prompt=5, presence_penalty=1.0)])
    whole.record_chunk(0, tokens, start=0)
    borders = [0, *sorted(set(cuts)), 8]
    for start, end in zip(borders, borders[1:], strict=False):
        pieces.record_chunk(0, tokens[start:end], start=start)
    assert torch.equal(whole.history, pieces.history)


def test_a_row_without_filters_is_bit_untouched():
    strange = [-0.0, math.nan, math.inf, -math.inf, 0.0, 1e-40, 3.0]
    logits = torch.tensor([strange, strange, [-0.0, -500.0, -math.inf, 0.0, 1e-40, 3.0, 2.0]])
    lanes = lane_state(3, vocab=logits.shape[1])
    lanes.write_rows([join(0, temperature=0.0, top_k=2, top_p=0.1, min_p=0.9), join(1), join(2)])
    filtered = cut(adjust(logits, lanes), lanes)
    assert torch.equal(filtered.view(torch.int32), logits.view(torch.int32))


def test_a_new_request_does_not_inherit_history():
    lanes = lane_state(1)
    lanes.write_rows([join(0, frequency_penalty=1.0)])
    lanes.record_chunk(0, torch.tensor([1, 2, 3]), start=0)
    lanes.write_rows([join(0, frequency_penalty=1.0)])
    assert not lanes.history.any()


def test_stop_ids_cannot_be_drawn_before_min_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, [0, 40]] = 50.0
    lanes = lane_state(1)
    lanes.write_rows([join(0, temperature=0.0, stop_ids=[40, 0], min_tokens=3)])
    sampler, active = Sampler(lanes, OneRank()), torch.ones(1, dtype=torch.bool)
    seen, stopped = [], []
    for _ in range(4):
        output = sampler.sample(logits, active, Variant.FILTERED)
        stopped.append(sampler.advance(output, active, Variant.FILTERED).item())
        seen.append(output.token_ids.item())
    assert seen == [1, 1, 1, 0]
    assert stopped == [False, False, False, True]


def test_a_bias_moves_only_its_ids():
    logits = random_logits(1)
    lanes = lane_state(1)
    lanes.write_rows([join(0, logit_bias={0: 1.5, 100: -100.0})])
    difference = adjust(logits, lanes)[0] - logits[0]
    assert difference.nonzero().flatten().tolist() == [0, 100]
    torch.testing.assert_close(difference[[0, 100]], torch.tensor([1.5, -100.0]))
