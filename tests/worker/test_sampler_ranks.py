"""Vocabulary shards on real ranks give what one rank with the whole vocabulary gives."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sampling_cases import VOCAB, OneRank, join, lane_state, random_logits

from lockstep.worker.sampler import Sampler
from lockstep.worker.sampling_state import Variant

NUM_STEPS = 6
CASES = {
    Variant.GREEDY: [{"temperature": 0.0}] * 4,
    Variant.PLAIN: [{"temperature": 0.0}, {}, {"temperature": 0.2}, {"temperature": 3.0}],
    Variant.FILTERED: [
        {"top_k": 3},
        {"top_p": 0.4, "frequency_penalty": 1.5, "repetition_penalty": 1.5},
        {"temperature": 0.0, "presence_penalty": 2.0, "logit_bias": {2: 3.0, 60: 5.0}},
        {},
    ],
    Variant.LOGPROBS: [{"logprobs": 4, "min_p": 0.1}, {"temperature": 0.0}, {}, {"top_k": 2}],
}


class Shards:
    """An all-gather over the default group, in rank order."""

    def __init__(self, size):
        self.size = size

    def all_gather(self, x):
        shards = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(shards, x)
        return torch.stack(shards)


def filled(lanes, variant):
    joins = [join(i, seed=i - 2, stop_ids=[9], **kind) for i, kind in enumerate(CASES[variant])]
    lanes.write_rows(joins)
    for lane in range(len(joins)):
        lanes.record_chunk(lane, torch.tensor([0, 50, 51, 100, 100]), start=0)
    return lanes


def step_logits(step):
    """All negative, so that a padded column that is not -inf would win."""
    logits = -10 - random_logits(4, seed=step).abs()
    if step == 3:
        logits[1, 77] = math.nan
        logits[2] = -math.inf
        logits[3, [20, 40, 70, 100]] = -1.0
    return logits


def steps_of(sampler, variant, columns):
    outputs, active = [], torch.tensor([True, True, True, True])
    for step in range(NUM_STEPS):
        output = sampler.sample(step_logits(step)[:, columns].contiguous(), active, variant)
        stopped = sampler.advance(output, active, variant)
        tensors = (output.token_ids, output.finite, stopped, *(output.logprobs or ()))
        outputs.append([tensor.numpy() for tensor in tensors])
    return outputs


def shard_steps(rank):
    local = -(-VOCAB // rank.size)
    start = rank.rank * local
    results = {}
    for variant in Variant:
        lanes = filled(lane_state(5, start=start, local=local), variant)
        results[variant] = steps_of(PaddedSampler(lanes, Shards(rank.size)), variant, slice(None))
    return results


class PaddedSampler(Sampler):
    """Takes the whole vocabulary and keeps this rank's columns, padded with -inf."""

    def sample(self, logits, active, variant):
        lanes = self.lanes
        padded = torch.nn.functional.pad(logits, (0, lanes.vocab_local), value=-math.inf)
        end = lanes.vocab_start + lanes.vocab_local
        return super().sample(padded[:, lanes.vocab_start : end].contiguous(), active, variant)


@pytest.mark.parametrize("size", [2, 3])
def test_shards_give_the_tokens_of_one_rank(size):
    of_ranks = run_ranks(shard_steps, size)
    for variant in Variant:
        alone = Sampler(filled(lane_state(5), variant), OneRank())
        expected = steps_of(alone, variant, slice(None))
        for of_rank in of_ranks:
            for got, want in zip(of_rank[variant], expected, strict=True):
                np.testing.assert_equal(got, want)
