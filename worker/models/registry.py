"""Which class runs an architecture. Modules are imported only when a model is built; no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

from lockstep.parallel.shard import HeadLayout, split_range
from lockstep.worker.config import ModelConfig

if TYPE_CHECKING:
    from lockstep.worker.models.decoder import DecoderModel

_DECODER = "lockstep.worker.models.decoder:DecoderModel"
ARCHITECTURES = {
    "LlamaForCausalLM": _DECODER,
    "MistralForCausalLM": _DECODER,
    "Qwen2ForCausalLM": _DECODER,
    "Qwen3ForCausalLM": _DECODER,
}


def check_architecture(architecture: str) -> None:
    """Raise ValueError if it is not supported; the message lists those that are."""
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {known}")


def model_class(architecture: str) -> "type[DecoderModel]":
    """The class of an architecture.

    Raises:
        ValueError: it is not supported.
    """
    check_architecture(architecture)
    module, _, name = ARCHITECTURES[architecture].partition(":")
    found: type[DecoderModel] = getattr(import_module(module), name)
    return found


def check_split(config: ModelConfig, tp_size: int) -> None:
    """Refuse at start-up what cannot be split over the ranks.

    Raises:
        ValueError: heads or intermediate size, with the numbers.
    """
    HeadLayout(config.num_heads, config.num_kv_heads, tp_size)
    split_range(config.intermediate_size, tp_size, 0, what="intermediate_size")
