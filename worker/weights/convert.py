"""A GGUF file of the llama family to a Hugging Face directory with float32 weights."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from lockstep.worker.config import ModelConfig, RopeScaling
from lockstep.worker.weights.gguf import GGUFSource
from lockstep.worker.weights.gguf_metadata import gguf_end_tokens, gguf_model_config, open_gguf
from lockstep.worker.weights.gguf_tokenizer import tokenizer_files
from lockstep.worker.weights.progress import Progress


def convert_gguf(path: Path, directory: Path, progress: Progress | None = None) -> None:
    """Write config, generation config, tokenizer and weights of ``path`` into ``directory``.

    Raises:
        ValueError: the file is damaged, or holds something that is not supported.
    """
    file = open_gguf(path)
    config, ends = gguf_model_config(file), list(gguf_end_tokens(file))
    texts = tokenizer_files(file)
    texts["config.json"] = json.dumps(hf_config(config) | {"eos_token_id": ends}, indent=2)
    texts["generation_config.json"] = json.dumps({"eos_token_id": ends}, indent=2)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    _write_weights(path, directory / "model.safetensors", progress)


def _write_weights(path: Path, target: Path, progress: Progress | None) -> None:
    source = GGUFSource(path)
    names = [name for name in source.names() if name.startswith(("model.", "lm_head."))]
    tensors = {}
    for done, name in enumerate(names, start=1):
        tensors[name] = source.read(name, 0, 0, source.shape(name)[0])
        if progress:
            progress("convert", done, len(names))
    save_file(tensors, target, metadata={"format": "pt"})


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """``config.json`` of a Llama model."""
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "dtype": "float32",
    }


def _rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    linear = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return linear
    return linear | {
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
