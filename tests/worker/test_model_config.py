"""What config.json, generation_config.json say; what is refused is named."""

import json

import hf_models
import pytest

from lockstep.worker.config import RopeScaling
from lockstep.worker.models.registry import check_architecture, check_split
from lockstep.worker.weights.generation import GenerationDefaults, read_generation_defaults
from lockstep.worker.weights.model_config import model_config_from

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def read(tmp_path, **changes):
    raw = {k: v for k, v in (LLAMA | changes).items() if v != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return model_config_from(tmp_path)


def test_plain_llama(tmp_path):
    config = read(tmp_path, rms_norm_eps=1e-5, rope_theta=500000, tie_word_embeddings=True)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 8, 2)
    assert (config.head_dim, config.rms_norm_eps, config.rope_theta) == (8, 1e-5, 500000.0)
    assert config.tie_embeddings and config.rope_scaling is None
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm)
    assert config.dtype == "float32"


def test_fields_left_out_mean_what_transformers_means(tmp_path):
    config = read(tmp_path, num_key_value_heads="absent", max_position_embeddings="absent")
    assert (config.num_kv_heads, config.max_position_embeddings) == (8, 2048)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 10000.0)
    mistral = read(tmp_path, architectures=["MistralForCausalLM"])
    assert mistral.sliding_window == 4096
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert qwen3.head_dim == 128 and qwen3.sliding_window is None


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_of_old_and_new_files(tmp_path, key):
    llama3 = dict(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_theta=5e5,
    )
    config = read(tmp_path, **{key: llama3})
    assert config.rope_scaling == RopeScaling(kind="llama3", factor=32.0)
    assert config.rope_theta == 5e5
    config = read(tmp_path, **{key: {"type": "linear", "factor": 2}})
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    assert read(tmp_path, **{key: {"rope_type": "default"}}).rope_scaling is None


def test_biases(tmp_path):
    llama = read(tmp_path, attention_bias=True, mlp_bias=True)
    assert llama.qkv_bias and llama.o_bias and llama.mlp_bias
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert qwen2.qkv_bias and not qwen2.o_bias
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert qwen3.qk_norm and not qwen3.qkv_bias


def test_windows(tmp_path):
    window = dict(use_sliding_window=True, sliding_window=16, max_window_layers=2)
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"], **window)
    assert [qwen2.window(i) for i in range(3)] == [None, None, 16]
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"], layer_types=kinds, **window)
    assert [qwen3.window(i) for i in range(3)] == [16, None, None]
    unused = window | dict(use_sliding_window=False)
    assert read(tmp_path, architectures=["Qwen2ForCausalLM"], **unused).window(2) is None
    mistral = read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None)
    assert mistral.window(0) is None
    assert read(tmp_path, sliding_window=9).window(0) is None


@pytest.mark.parametrize("case", hf_models.CASES)
def test_types_that_transformers_writes(case, tmp_path):
    hf_models.save(hf_models.make(case).bfloat16(), tmp_path)
    assert model_config_from(tmp_path).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architectures=["GPT2LMHeadModel"]), "architecture 'GPT2LMHeadModel' is not suppor"),
        (dict(architectures="absent"), "architecture '' is not supported; supported: LlamaFor"),
        (dict(hidden_size="absent"), "missing required field `hidden_size`"),
        (dict(hidden_size=[64]), r"Expected `int`, got `array` - at `\$.hidden_size`"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported; supported: silu"),
        (dict(hidden_size=65), "hidden_size 65 is not a multiple of 8 heads"),
        (dict(quantization_config={"quant_method": "awq"}), "quant_method 'awq' is not supported"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 4}), "rope scaling 'yarn' is not supp"),
        (dict(rope_scaling={"type": "linear"}), "rope scaling 'linear' needs a factor"),
        (dict(rope_scaling={"type": "llama3", "factor": 8}), "'llama3' needs original_max_pos"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported"),
        (dict(torch_dtype="float64"), "Invalid enum value 'float64'"),
        (
            dict(
                architectures=["Qwen2ForCausalLM"],
                use_sliding_window=True,
                layer_types=["full_attention"],
            ),
            "layer_types must name 3 layers full_attention or sliding_attention",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_damaged_or_absent_config(tmp_path):
    with pytest.raises(ValueError, match="holds no config.json"):
        model_config_from(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: Input data was truncated"):
        model_config_from(tmp_path)


def test_split_is_checked_before_anything_is_built(tmp_path):
    config = read(tmp_path)
    check_split(config, 8)
    with pytest.raises(ValueError, match="must be at most num_heads=8, got 16"):
        check_split(config, 16)
    with pytest.raises(ValueError, match="must divide intermediate_size=128, got 3"):
        check_split(config, 3)
    with pytest.raises(ValueError, match="architecture 'Mamba' is not supported"):
        check_architecture("Mamba")


def write_generation(tmp_path, generation=None, **config):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_generation_defaults(tmp_path)


def test_generation_defaults(tmp_path):
    written = dict(
        eos_token_id=[8, 9],
        do_sample=True,
        temperature=0.6,
        top_p=0.9,
        top_k=20,
        min_p=0,
        repetition_penalty=1.1,
        transformers_version="5",
    )
    assert write_generation(tmp_path, written, eos_token_id=7) == GenerationDefaults(
        eos_token_ids=(8, 9, 7),
        temperature=0.6,
        top_p=0.9,
        top_k=20,
        min_p=0.0,
        repetition_penalty=1.1,
    )


def test_files_that_say_little(tmp_path):
    assert write_generation(tmp_path, eos_token_id=[3, 3]).eos_token_ids == (3,)
    assert write_generation(tmp_path, {"eos_token_id": 0}) == GenerationDefaults(eos_token_ids=(0,))
    greedy = write_generation(tmp_path, {"do_sample": False, "temperature": 0.7})
    assert greedy.temperature == 0.0
    with pytest.raises(ValueError, match="generation_config.json: Expected `int |"):
        write_generation(tmp_path, {"top_k": "many"})
