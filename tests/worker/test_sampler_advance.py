"""Stops, positions, history and log-probabilities over several steps."""

import pytest
import torch
from sampling_cases import VOCAB, OneRank, join, lane_state, random_logits, sample_once

from lockstep.comm.sampling import MAX_LOGPROBS
from lockstep.worker.sampler import SampleOutput, Sampler
from lockstep.worker.sampling_state import Variant

PENALISED = {"temperature": 0.9, "frequency_penalty": 1.2, "repetition_penalty": 1.2, "top_p": 0.9}


def active(*flags):
    return torch.tensor(flags, dtype=torch.bool)


def generate(lanes, num_steps, first=0):
    """Tokens of lane 0 over steps whose logits depend on the step only."""
    sampler, tokens = Sampler(lanes, OneRank()), []
    for step in range(first, first + num_steps):
        output = sampler.sample(
            random_logits(1, seed=step, scale=1.0), active(True), lanes.variant()
        )
        sampler.advance(output, active(True), lanes.variant())
        tokens.append(output.token_ids.item())
    return tokens


@pytest.mark.parametrize("sampling", [{}, PENALISED])
@pytest.mark.parametrize("num_before", [1, 5, 11])
def test_preemption_continues_with_the_same_tokens(sampling, num_before):
    prompt = [3, 1, 4]
    lanes = lane_state(1)
    lanes.write_rows([join(0, seed=42, **sampling)])
    lanes.record_chunk(0, torch.tensor(prompt), start=0)
    expected = generate(lanes, 12)
    resumed = lane_state(1)
    resumed.write_rows([join(0, seed=42, num_outputs=num_before, **sampling)])
    recomputed = torch.tensor(prompt + expected[:num_before])
    resumed.record_chunk(0, recomputed[:2], start=0)
    resumed.record_chunk(0, recomputed[2:], start=2)
    assert generate(resumed, 12 - num_before, first=num_before) == expected[num_before:]
    assert torch.equal(resumed.history, lanes.history)


def test_inactive_lanes_keep_their_state_bit_for_bit():
    lanes = lane_state(3)
    lanes.write_rows([join(lane, stop_ids=[5], **PENALISED) for lane in range(3)])
    before = {name: tensor.clone() for name, tensor in lanes.statics().items()}
    output = SampleOutput(torch.tensor([5, 0, 7]), active(True, True, False), None)
    stopped = Sampler(lanes, OneRank()).advance(
        output, active(False, False, False), Variant.FILTERED
    )
    assert not stopped.any()
    for name, tensor in lanes.statics().items():
        assert torch.equal(tensor, before[name])


def test_only_a_stop_id_or_bad_logits_stop_a_lane():
    lanes = lane_state(4)
    lanes.write_rows([join(lane, stop_ids=[5, 100]) for lane in range(3)] + [join(3)])
    output = SampleOutput(torch.tensor([5, 6, 0, 5]), active(True, True, False, True), None)
    stopped = Sampler(lanes, OneRank()).advance(
        output, active(True, True, True, True), Variant.PLAIN
    )
    assert stopped.tolist() == [True, False, True, False]
    assert lanes.position.tolist() == [1, 1, 0, 1]


def test_outputs_are_counted_on_the_rank_that_holds_them():
    lanes = lane_state(2, start=50, local=51)
    lanes.write_rows([join(0, **PENALISED), join(1, **PENALISED)])
    sampler = Sampler(lanes, OneRank())
    for token in (60, 60, 10, 0):
        output = SampleOutput(torch.tensor([token, 100]), active(True, True), None)
        sampler.advance(output, active(True, True), Variant.FILTERED)
    assert lanes.history.nonzero().tolist() == [[0, 10], [1, 50]]
    assert lanes.history[0, 10] == 4 and lanes.history[1, 50] == 8


@pytest.mark.parametrize("vocab", [VOCAB, 7])
def test_logprobs_are_those_of_the_raw_logits(vocab):
    logits = random_logits(5, vocab=vocab)
    joins = [join(lane, seed=lane, temperature=0.4, top_k=3, logprobs=5) for lane in range(5)]
    output = sample_once(logits, joins)
    expected = logits.log_softmax(dim=-1)
    for lane, token in enumerate(output.token_ids.tolist()):
        entry = output.logprobs.of_lane(lane, token, 5)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[lane, token].item(), abs=1e-6)
        assert entry.rank == 1 + int((logits[lane] > logits[lane, token]).sum())
        best = expected[lane].sort(descending=True, stable=True)
        assert entry.top_ids == best.indices[:5].tolist()
        assert entry.top_logprobs == pytest.approx(best.values[:5].tolist(), abs=1e-6)


def test_logprobs_put_the_lower_id_first_among_equals():
    logits = torch.tensor([[0.0, -1.0, 2.0, -0.0, -1.0, 2.0]])
    output = sample_once(logits, [join(0, temperature=0.0, logprobs=5)])
    assert output.logprobs.of_lane(0, 2, 5).top_ids == [2, 5, 0, 3, 1]


def test_logprobs_have_one_shape_for_all_requests():
    output = sample_once(random_logits(2), [join(0, logprobs=0), join(1)])
    assert output.logprobs.top_ids.shape == (2, MAX_LOGPROBS)
