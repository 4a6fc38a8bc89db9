"""Sampling rules of design.md section 4: neighbours do not matter, bad rows are seen."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle_sampling import adjusted_logits, draw
from sampling_cases import VOCAB, OneRank, join, lane_state, random_logits, sample_once

from lockstep.comm.sampling import SamplingParams
from lockstep.worker.sampler import Sampler
from lockstep.worker.sampling_state import Variant

ALL = torch.ones(1, dtype=torch.bool)
FILTERS = {"top_k": 5, "top_p": 0.7, "min_p": 0.05}

sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB - 1, VOCAB, 5000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([-1.0, 0.0, 0.4]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=4),
    min_tokens=st.integers(0, 4),
    max_tokens=st.none(),
)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@settings(deadline=None)
@given(
    params=sampling_params,
    seed=st.integers(-(2**63), 2**63 - 1),
    prompt=tokens,
    outputs=tokens,
    stop_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3, unique=True),
    logit_seed=st.integers(0, 10**6),
)
def test_token_is_the_oracles(params, seed, prompt, outputs, stop_ids, logit_seed):
    logits = random_logits(1, seed=logit_seed)
    lanes = lane_state(1)
    lanes.write_rows(
        [join(0, seed=seed, stop_ids=stop_ids, num_prompt=len(prompt),
              num_outputs=len(outputs), params=params)]
    )  # fmt: skip
    lanes.record_chunk(0, torch.tensor(prompt + outputs, dtype=torch.int64), start=0)
    token = Sampler(lanes, OneRank()).sample(logits, ALL, lanes.variant()).token_ids.item()
    adjusted = adjusted_logits(logits[0].tolist(), params, prompt, outputs, stop_ids)
    assert token == draw(adjusted, params, seed, len(outputs))


@settings(deadline=None)
@given(
    params=sampling_params,
    others=st.lists(sampling_params, min_size=1, max_size=4),
    lane=st.integers(0, 7),
    num_rows=st.integers(1, 8),
)
def test_token_ignores_lane_neighbours_and_padding(params, others, lane, num_rows):
    assume(lane < num_rows)
    logits = random_logits(num_rows)
    joins = [join(i, seed=i, params=p) for i, p in enumerate(others) if i < num_rows and i != lane]
    alone = sample_once(logits[lane : lane + 1], [join(0, seed=77, params=params)])
    shared = sample_once(logits, [*joins, join(lane, seed=77, params=params)], num_lanes=9)
    assert shared.token_ids[lane] == alone.token_ids[0]


@pytest.mark.parametrize("variant", list(Variant))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_variant_that_serves_a_lane_gives_its_token(variant, temperature):
    logits = random_logits(16)
    joins = [join(lane, seed=lane, temperature=temperature) for lane in range(16)]
    least = sample_once(logits, joins)
    if variant >= (Variant.PLAIN if temperature else Variant.GREEDY):
        assert torch.equal(sample_once(logits, joins, variant=variant).token_ids, least.token_ids)


def test_greedy_ignores_noise_filters_and_seed():
    logits = random_logits(4)
    joins = [join(lane, seed=lane, temperature=0.0, **FILTERS) for lane in range(4)]
    for variant in Variant:
        output = sample_once(logits, joins, variant=variant)
        assert torch.equal(output.token_ids, logits.argmax(dim=-1))


@pytest.mark.parametrize("variant", list(Variant))
def test_lowest_id_wins_a_tie(variant):
    logits = torch.full((1, VOCAB), -2.0)
    logits[0, [90, 17, 63]] = -1.0
    assert sample_once(logits, [join(0, temperature=0.0)], variant=variant).token_ids.item() == 17


@pytest.mark.parametrize("variant", list(Variant))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_bad_row_is_named_and_harms_no_other(variant, value, temperature):
    logits = random_logits(4)
    joins = [join(lane, seed=lane, temperature=temperature, **FILTERS) for lane in range(4)]
    clean = sample_once(logits, joins, variant=variant)
    logits[2, 60] = value
    dirty = sample_once(logits, joins, variant=variant)
    assert dirty.finite.tolist() == [True, True, False, True]
    assert dirty.token_ids[2] == 0
    clean.token_ids[2] = 0
    assert torch.equal(dirty.token_ids, clean.token_ids)


@pytest.mark.parametrize("variant", list(Variant))
def test_row_without_a_possible_token_is_bad(variant):
    logits = random_logits(2)
    logits[0] = float("-inf")
    assert sample_once(logits, [join(0), join(1)], variant=variant).finite.tolist() == [False, True]


@pytest.mark.parametrize("variant", list(Variant))
def test_inactive_row_may_hold_anything(variant):
    logits = random_logits(3)
    logits[1] = float("nan")
    active = torch.tensor([True, False, True])
    output = sample_once(logits, [join(0), join(2)], active=active, variant=variant)
    assert output.finite.all() and output.token_ids[1] == 0


def test_equal_requests_with_drawn_seeds_differ():
    logits = torch.zeros(1, VOCAB).repeat(20, 1)
    output = sample_once(logits, [join(lane, seed=1000 + lane) for lane in range(20)])
    assert len(set(output.token_ids.tolist())) > 10


def test_sampling_leaves_the_logits_alone():
    logits = random_logits(3)
    before = logits.clone()
    sample_once(logits, [join(i, repetition_penalty=1.4, **FILTERS) for i in range(3)])
    assert torch.equal(logits, before)


def test_global_generator_is_not_touched():
    before = torch.random.get_rng_state()
    sample_once(random_logits(3), [join(0), join(1, **FILTERS)])
    assert torch.equal(torch.random.get_rng_state(), before)
