"""Small GGUF files, written with the gguf library as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = name.rsplit(".", 1)
    if stem in outer:
        return f"{outer[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[inner]}.{kind}"


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in halves of a head -> rows in neighbouring pairs."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_model(path: Path, model: Any, kind: Type, **changes: Any) -> dict[str, torch.Tensor]:
    """Write a transformers Llama with its matrices as ``kind``.

    Returns the weights that the file now holds, under their own names and in their own row order.
    """
    config = model.config
    writer = new_writer(path, config, **changes)
    held = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        count = next((n for part, n in heads.items() if part in name), None)
        own = kind if values.ndim == 2 else Type.F32
        data = gguf.quantize(values, own)
        held[name] = torch.from_numpy(gguf.dequantize(data, own).copy()).reshape(tensor.shape)
        stored = data if count is None else interleaved(data, count)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored), raw_dtype=own)
    finish(writer)
    return held


def new_writer(path: Path, config: Any = None, *, arch: str = "llama", **extra: Any) -> GGUFWriter:
    """A writer with the keys of a model; ``extra`` are further keys, with _ for the dots."""
    writer = GGUFWriter(path, arch)
    if config is not None:
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in extra.items():
        if key == "tokens":
            writer.add_token_list(value)
            writer.add_token_types([1] * len(value))
            writer.add_token_merges(["a b"])
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key.replace("__", "."), value)
    return writer


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
