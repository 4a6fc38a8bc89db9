"""GGUF files round trip: every type, the order of q and k rows, slices, and what is refused."""

import gguf_files
import hf_models
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from one_request import OneRank, OneRequest, loaded, worker_config

from lockstep.worker.config import RopeScaling
from lockstep.worker.weights.generation import read_generation_defaults
from lockstep.worker.weights.gguf import GGUFSource
from lockstep.worker.weights.model_config import model_config_from

IDS = [1, 77, 30, 30, 8, 100, 0, 54, 21, 3, 99]
SHAPE = dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, intermediate_size=128)
TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]


@pytest.fixture(scope="module")
def model():
    return hf_models.make("llama", **SHAPE)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_a_file_gives_the_logits_of_the_weights_it_holds(model, kind, tmp_path):
    path = tmp_path / "model.gguf"
    held = gguf_files.write_model(path, model, kind)
    oracle = hf_models.make("llama", **SHAPE)
    oracle.load_state_dict(held)
    ours = loaded(worker_config(model_config_from(path), path))
    got = OneRequest(ours).forward(IDS)
    torch.testing.assert_close(got, hf_models.logits(oracle, IDS), atol=1e-4, rtol=0)


def test_biases_and_a_tied_head_come_from_the_tensors(tmp_path):
    changes = dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    oracle = hf_models.make("llama", **(SHAPE | changes))
    path = tmp_path / "model.gguf"
    gguf_files.write_model(path, oracle, Type.F32)
    config = model_config_from(path)
    assert config.tie_embeddings and config.qkv_bias and config.o_bias and config.mlp_bias
    got = OneRequest(loaded(worker_config(config, path))).forward(IDS)
    torch.testing.assert_close(got, hf_models.logits(oracle, IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [Type.F32, Type.Q4_1], ids=lambda kind: kind.name)
def test_slices_are_parts_of_the_whole_and_dequantise_no_more(model, kind, tmp_path):
    path = tmp_path / "model.gguf"
    held = gguf_files.write_model(path, model, kind)
    source = GGUFSource(path)
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        rows, columns = source.shape(name)
        part = source.read(name, 0, 16, 32)
        assert torch.equal(part, held[name][16:48])
        assert part.untyped_storage().nbytes() == 4 * 32 * columns
        start, length = 16, columns // 2
        if name.endswith("q_proj.weight"):
            continue
        part = source.read(name, 1, start, length)
        assert torch.equal(part, held[name][:, start : start + length])
        assert part.untyped_storage().nbytes() <= 4 * rows * (length + 32)


def test_ranks_load_padded_heads(model, tmp_path):
    path = tmp_path / "model.gguf"
    held = gguf_files.write_model(path, model, Type.Q8_0)
    config = worker_config(model_config_from(path), path)
    attention = loaded(config, OneRank(1, 2)).model.layers[0].self_attn
    query = held["model.layers.0.self_attn.q_proj.weight"][64:]
    output = held["model.layers.0.self_attn.o_proj.weight"][:, 64:]
    assert torch.equal(attention.qkv_proj.weight[:32], query)
    assert torch.equal(attention.o_proj.weight[:, :32], output)
    assert not attention.qkv_proj.weight[32:64].any()


def test_shape_and_end_tokens_of_the_metadata(model, tmp_path):
    path = tmp_path / "model.gguf"
    keys = {
        "tokenizer__ggml__eos_token_id": 7,
        "tokenizer__ggml__eot_token_id": 9,
        "general__file_type": 1,
        "llama__rope__scaling__type": "linear",
        "llama__rope__scaling__factor": 4.0,
    }
    gguf_files.write_model(path, model, Type.F16, **keys)
    config = model_config_from(path)
    expected = model_config_from(hf_models.save(model, tmp_path / "hf"))
    linear = RopeScaling(kind="linear", factor=4.0)
    changes = dict(dtype="float16", rope_scaling=linear, initializer_range=0.02)
    assert config == msgspec.structs.replace(expected, **changes)
    assert read_generation_defaults(path).eos_token_ids == (7, 9)


def write_frequencies(path, model, divisors):
    writer = gguf_files.new_writer(path, model.config)
    rows = np.zeros((model.config.vocab_size, model.config.hidden_size), np.float32)
    writer.add_tensor("token_embd.weight", rows)
    writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    gguf_files.finish(writer)


def test_llama3_scaling_is_told_from_its_divisors(tmp_path):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_theta=500000.0,
    )
    wide = dict(head_dim=128, num_attention_heads=1, num_key_value_heads=1, hidden_size=128)
    long = dict(rope_parameters=scaling, max_position_embeddings=131072)
    model = hf_models.make("llama", **long, **wide)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    divisors = (plain / scaled).numpy().round(5)
    path = tmp_path / "llama3.gguf"
    write_frequencies(path, model, divisors)
    assert model_config_from(path).rope_scaling == RopeScaling(kind="llama3", factor=8.0)
    other = tmp_path / "other.gguf"
    write_frequencies(other, model, divisors**0.5)
    with pytest.raises(ValueError, match="other.gguf: rope_freqs.weight does not follow"):
        model_config_from(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(arch="phi3"), "GGUF architecture 'phi3' is not supported; supported: llama"),
        (dict(llama__expert_count=8), "llama.expert_count is not supported"),
        (dict(split__count=3), "is one part of 3; merge them first"),
        (dict(llama__rope__dimension_count=8), "llama.rope.dimension_count must be 16"),
        (dict(llama__rope__scaling__type="yarn"), "llama.rope.scaling.type 'yarn' is not supp"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(model, changes, message, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_files.write_model(path, model, Type.F32, **changes)
    with pytest.raises(ValueError, match=message):
        model_config_from(path)


def test_damaged_files_are_named(model, tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match="model.gguf is not a file"):
        model_config_from(path)
    path.write_bytes(b"no gguf at all, but long enough to be read as one")
    with pytest.raises(ValueError, match="cannot read .*model.gguf as GGUF"):
        model_config_from(path)
    gguf_files.write_model(path, model, Type.F32)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="cannot read .*model.gguf as GGUF"):
        model_config_from(path)
    gguf_files.finish(gguf_files.new_writer(path))
    with pytest.raises(ValueError, match="metadata key 'llama.embedding_length' is missing"):
        model_config_from(path)


def test_a_type_that_cannot_be_dequantised_is_named(model, tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf_files.new_writer(path, model.config)
    writer.add_tensor("token_embd.weight", np.zeros((4, 96), np.int8))
    gguf_files.finish(writer)
    with pytest.raises(ValueError, match="'token_embd.weight' is of type I8, which the gguf"):
        GGUFSource(path).read("model.embed_tokens.weight", 0, 0, 4)
