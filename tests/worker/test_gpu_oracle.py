"""Half precision against float32: no worse than transformers is, on the shapes of real models.

One set of random weights, drawn in bfloat16, goes into transformers in float32 (the reference),
transformers in bfloat16, and ours in bfloat16; all are forced along the same 64 tokens. Ours takes
the first in one piece and the others one by one, as serving does.
"""

import gc
import json
from pathlib import Path

import hf_models
import pytest
import torch
from one_request import OneRequest, new_model, worker_config

from lockstep.worker.accuracy import compare, sure_positions
from lockstep.worker.weights.load import load_weights, open_source
from lockstep.worker.weights.model_config import model_config_from

SHAPES = Path(__file__).parents[1] / "data" / "models"
NUM_TOKENS, NUM_FIRST = 64, 16


def our_logits(path, ids, device):
    """(logits, source of the weights)."""
    config = worker_config(model_config_from(path), path, load_format="dummy")
    model = new_model(config.model, device=device, dtype=torch.bfloat16)
    load_weights(model, config)
    source = open_source(config, list(model.weight_shards()), device)
    request = OneRequest(model)
    parts = [request.forward(ids[:NUM_FIRST])]
    parts += [request.forward([token_id]) for token_id in ids[NUM_FIRST:]]
    return torch.cat(parts).float(), source


def their_logits(path, source, ids, device, dtype):
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(source.read(name, 0, 0, parameter.shape[0]))
        return hf_models.logits(model, ids)


def collect(device):
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def check(path, device):
    vocab_size = model_config_from(path).vocab_size
    generator = torch.Generator().manual_seed(64)
    ids = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=generator).tolist()
    ours, source = our_logits(path, ids, device)
    collect(device)
    reference = their_logits(path, source, ids, device, torch.float32)
    collect(device)
    theirs = their_logits(path, source, ids, device, torch.bfloat16)
    right = ours.argmax(1) == reference.argmax(1)
    sure = sure_positions(reference, theirs)
    found = compare(ours - reference, theirs - reference, sure, right)
    print(f"{path.name}: {found}")  # noqa: T201
    assert found.passed
    assert found.most <= 1.5 * found.plain_most
    assert found.num_sure


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.1-8b"])
def test_bfloat16_on_a_gpu(name):
    collect(torch.device("cuda"))
    check(SHAPES / name, torch.device("cuda"))


def test_bfloat16_on_a_cpu(tmp_path):
    small = dict(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        vocab_size=1000,
        head_dim=32,
        max_position_embeddings=NUM_TOKENS,
        initializer_range=0.08,
        dtype="bfloat16",
    )
    raw = json.loads((SHAPES / "qwen3-0.6b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | small))
    check(tmp_path, torch.device("cpu"))
