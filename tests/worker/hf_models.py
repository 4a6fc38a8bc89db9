"""Tiny random models of every architecture, made and saved by transformers: the oracle."""

from pathlib import Path
from typing import Any

import torch

_SHAPE: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=96,
    # Wide weights: logits then differ enough that a wrong order of anything shows.
    initializer_range=0.3,
)
_LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_WINDOW = dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-scaled-tied": ("Llama", dict(rope_scaling=_LLAMA3, tie_word_embeddings=True)),
    "llama-linear-bias": (
        "Llama",
        dict(rope_scaling=dict(rope_type="linear", factor=4.0), attention_bias=True, mlp_bias=True),
    ),
    "mistral": ("Mistral", dict(sliding_window=7)),
    "mistral-head-dim": ("Mistral", dict(sliding_window=None, head_dim=12)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-windows": ("Qwen2", _WINDOW),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3-windows-bias": ("Qwen3", dict(head_dim=10, attention_bias=True, **_WINDOW)),
}


def make(case: str, **changes: Any) -> Any:
    """A model with random weights, those of norms and biases included."""
    # Imported here: ranks import the test files, and this takes seconds.
    import transformers

    family, settings = CASES[case]
    config = getattr(transformers, f"{family}Config")(**(_SHAPE | settings | changes))
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
        else:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return model


def save(model: Any, directory: Path, *, max_shard_size: str = "40KB") -> Path:
    """Write config and weights, split over several files."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@torch.inference_mode()
def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab_size]."""
    result: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return result
