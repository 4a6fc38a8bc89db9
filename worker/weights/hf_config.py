"""``config.json`` of a Hugging Face directory to ModelConfig. No torch.

Fields that change what a model computes are read or refused; the rest is ignored. Defaults are
those that transformers uses for a field that the file leaves out.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from lockstep.worker.config import Dtype, ModelConfig, RopeScaling
from lockstep.worker.models.registry import check_architecture

_MAX_POSITIONS = {"LlamaForCausalLM": 2048, "MistralForCausalLM": 131072}
_DEFAULT_MAX_POSITIONS = 32768
_DEFAULT_WINDOW = 4096
_QWEN3_HEAD_DIM = 128


class _Rope(msgspec.Struct):
    """``rope_parameters`` of new files, ``rope_scaling`` of older ones."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0


class _HfConfig(msgspec.Struct):
    architectures: list[str]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int | None = None
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None | UnsetType = UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None


class _Named(msgspec.Struct):
    """Read first: files of other architectures may lack every other field."""

    architectures: list[str] = []


def read_hf_config(directory: Path) -> ModelConfig:
    """Read ``directory / "config.json"``.

    Raises:
        ValueError: the file is missing or damaged, or names something unsupported.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} holds no config.json")
    try:
        named = msgspec.json.decode(path.read_bytes(), type=_Named)
        check_architecture(", ".join(named.architectures))
        return _convert(msgspec.json.decode(path.read_bytes(), type=_HfConfig))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _convert(raw: _HfConfig) -> ModelConfig:
    architecture = raw.architectures[0]
    _refuse_unknown(raw)
    window, window_layers = _windows(raw, architecture)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=_head_dim(raw, architecture),
        max_position_embeddings=_max_positions(raw, architecture),
        rms_norm_eps=raw.rms_norm_eps,
        rope_theta=_rope(raw).rope_theta or raw.rope_theta or 10000.0,
        rope_scaling=_rope_scaling(_rope(raw)),
        tie_embeddings=raw.tie_word_embeddings,
        qkv_bias=is_qwen2 or raw.attention_bias,
        o_bias=raw.attention_bias and not is_qwen2,
        mlp_bias=raw.mlp_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=window,
        window_layers=window_layers,
        initializer_range=raw.initializer_range,
        dtype=_dtype(raw),
    )


def _refuse_unknown(raw: _HfConfig) -> None:
    if raw.quantization_config is not None:
        method = raw.quantization_config.get("quant_method")
        raise ValueError(f"quantization_config: quant_method {method!r} is not supported")
    if raw.hidden_act != "silu":
        raise ValueError(f"hidden_act {raw.hidden_act!r} is not supported; supported: silu")
    partial = min(raw.partial_rotary_factor, _rope(raw).partial_rotary_factor)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported; supported: 1.0")


def _head_dim(raw: _HfConfig, architecture: str) -> int:
    if raw.head_dim is not None:
        return raw.head_dim
    if architecture == "Qwen3ForCausalLM":
        return _QWEN3_HEAD_DIM
    size, rest = divmod(raw.hidden_size, raw.num_attention_heads)
    if rest:
        heads = raw.num_attention_heads
        raise ValueError(f"hidden_size {raw.hidden_size} is not a multiple of {heads} heads")
    return size


def _max_positions(raw: _HfConfig, architecture: str) -> int:
    default = _MAX_POSITIONS.get(architecture, _DEFAULT_MAX_POSITIONS)
    return raw.max_position_embeddings or default


def _rope(raw: _HfConfig) -> _Rope:
    return raw.rope_parameters or raw.rope_scaling or _Rope()


def _rope_scaling(rope: _Rope) -> RopeScaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ValueError(
            f"rope scaling {kind!r} is not supported; supported: default, linear, llama3"
        )
    if rope.factor is None:
        raise ValueError(f"rope scaling {kind!r} needs a factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.factor)
    if rope.original_max_position_embeddings is None:
        raise ValueError("rope scaling 'llama3' needs original_max_position_embeddings")
    return RopeScaling(
        kind="llama3",
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_max_position_embeddings=rope.original_max_position_embeddings,
    )


def _windows(raw: _HfConfig, architecture: str) -> tuple[int | None, tuple[bool, ...] | None]:
    """(length, layers that use it); Llama has none, Mistral has one on all layers."""
    window = _DEFAULT_WINDOW if raw.sliding_window is UNSET else raw.sliding_window
    if architecture == "LlamaForCausalLM":
        return None, None
    if architecture == "MistralForCausalLM":
        return window, None
    if not raw.use_sliding_window or window is None:
        return None, None
    return window, tuple(kind == "sliding_attention" for kind in _layer_types(raw))


def _layer_types(raw: _HfConfig) -> list[str]:
    first, count = raw.max_window_layers, raw.num_hidden_layers
    if raw.layer_types is None:
        return ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    unknown = set(raw.layer_types) - {"sliding_attention", "full_attention"}
    if unknown or len(raw.layer_types) != count:
        raise ValueError(
            f"layer_types must name {count} layers full_attention or sliding_attention, "
            f"got {raw.layer_types}"
        )
    return raw.layer_types


def _dtype(raw: _HfConfig) -> Dtype:
    dtype: Dtype = msgspec.convert(raw.dtype or raw.torch_dtype or "float32", Dtype)
    return dtype
