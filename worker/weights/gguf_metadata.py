"""What a GGUF file says about its model. No torch.

Only the llama family: its keys start with "llama." and its q and k rows are interleaved.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from lockstep.worker.config import Dtype, ModelConfig, RopeScaling

_ARCHITECTURE = "llama"
_FILE_DTYPES: dict[int, Dtype] = {0: "float32", 1: "float16"}
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


class GGUFFile:
    """Metadata by key and tensors by GGUF name; tensor data stays on disk until it is touched."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self.tensors: Mapping[str, ReaderTensor] = {t.name: t for t in reader.tensors}
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """Raise ValueError if the file does not hold the key."""
        if key not in self._fields:
            raise ValueError(f"{self.path}: metadata key {key!r} is missing")
        return self.get(key)


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file of the llama family.

    Raises:
        ValueError: no such file, damaged, of another architecture, or one part of several.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    return _open(path, path.stat().st_mtime_ns)


# Parsing a large vocabulary takes seconds; config, tokenizer and weights are read in turn.
@lru_cache(maxsize=1)
def _open(path: Path, modified: int) -> GGUFFile:
    try:
        file = GGUFFile(path, GGUFReader(path))
    except (ValueError, IndexError, OSError) as error:
        raise ValueError(f"cannot read {path} as GGUF: {error}") from error
    architecture = file.need("general.architecture")
    if architecture != _ARCHITECTURE:
        raise ValueError(
            f"{path}: GGUF architecture {architecture!r} is not supported; supported: llama"
        )
    if file.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one part of {file.get('split.count')}; merge them first")
    return file


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """The shape of the model.

    Raises:
        ValueError: a key is missing, or the file uses what is not supported (named).
    """
    if file.get("llama.expert_count", 0):
        raise ValueError(f"{file.path}: llama.expert_count is not supported")
    hidden, heads = file.need("llama.embedding_length"), file.need("llama.attention.head_count")
    head_dim = file.get("llama.attention.key_length", hidden // heads)
    if file.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{file.path}: llama.rope.dimension_count must be {head_dim}")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=int(file.tensors["token_embd.weight"].shape[1]),
        hidden_size=hidden,
        intermediate_size=file.need("llama.feed_forward_length"),
        num_layers=file.need("llama.block_count"),
        num_heads=heads,
        num_kv_heads=file.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=file.need("llama.context_length"),
        rms_norm_eps=_shortest(file.need("llama.attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(file.get("llama.rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(file, head_dim),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        dtype=_FILE_DTYPES.get(file.get("general.file_type"), "bfloat16"),
    )


def gguf_end_tokens(file: GGUFFile) -> tuple[int, ...]:
    """End of text and end of turn, where the file names them."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = (file.get(key) for key in keys)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _shortest(value: float) -> float:
    """A float32 of the file as the number that was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, head_dim: int) -> RopeScaling | None:
    kind = file.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=file.need("llama.rope.scaling.factor"))
    if kind != "none":
        raise ValueError(f"{file.path}: llama.rope.scaling.type {kind!r} is not supported")
    if "rope_freqs.weight" not in file.tensors:
        return None
    return _llama3_scaling(file, head_dim)


def _llama3_scaling(file: GGUFFile, head_dim: int) -> RopeScaling:
    """Llama-3 files hold the divisor of every frequency instead of the rule that makes them.

    Raises:
        ValueError: the divisors do not follow the Llama-3 rule.
    """
    tensor = file.tensors["rope_freqs.weight"]
    divisors = dequantize(tensor.data, tensor.tensor_type)
    factor = float(divisors.max())
    theta = file.get("llama.rope.freq_base", 10000.0)
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_ORIGINAL * frequencies / (2 * np.pi)
    keep = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    expected = 1 / (keep + (1 - keep) / factor)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(f"{file.path}: rope_freqs.weight does not follow the Llama-3 rule")
    return RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
        original_max_position_embeddings=_LLAMA3_ORIGINAL,
    )
