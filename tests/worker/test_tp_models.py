"""Models over real ranks give the tokens of one rank, whether or not their heads divide."""

import hf_models
import pytest
import torch
from gloo_tp import GlooTP
from one_request import OneRank, OneRequest, loaded, worker_config
from ranks import Rank, run_ranks

from lockstep.worker.weights.model_config import model_config_from

PROMPT = [5, 17, 100, 3, 64, 0, 9]
NUM_TOKENS = 12
# (case, changes): 9 / 3 heads as SmolLM2 and 14 / 2 as Qwen2-0.5B, biases and head norms included.
_NINE = dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
MODELS = {
    "smol": ("llama-scaled-tied", _NINE),
    "qwen2": ("qwen2-windows", dict(num_attention_heads=14, num_key_value_heads=2, hidden_size=56)),
    "qwen3": ("qwen3-windows-bias", _NINE),
    "biases": ("llama-linear-bias", dict(num_attention_heads=4, num_key_value_heads=4)),
}


def generate(rank: Rank, paths):
    """(logits of the prompt, greedy tokens) of each model."""
    return [generate_one(GlooTP(rank), path) for path in paths]


@torch.inference_mode()
def generate_one(tp, path):
    model = loaded(worker_config(model_config_from(path), path, tp_size=tp.size), tp)
    request = OneRequest(model)
    logits = tp.columns(request.forward(PROMPT))
    first, tokens = logits, []
    for _ in range(NUM_TOKENS):
        tokens.append(int(logits[-1].argmax()))
        logits = tp.columns(request.forward(tokens[-1:]))
    return first[:, : model.config.vocab_size].numpy(), tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    paths = []
    for name, (case, changes) in MODELS.items():
        model = hf_models.make(case, **changes)
        paths.append(hf_models.save(model, tmp_path_factory.mktemp(name)))
    return paths


class Alone(OneRank):
    def columns(self, x):
        return x


@pytest.fixture(scope="module")
def alone(saved):
    return [generate_one(Alone(), path) for path in saved]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tokens_and_logits_are_those_of_one_rank(saved, alone, size):
    ranks = run_ranks(generate, size, saved)
    for name, expected, *results in zip(MODELS, alone, *ranks, strict=True):
        for logits, tokens in results:
            assert tokens == expected[1], name
            assert abs(logits - expected[0]).max() < 1e-4, name
