"""A model over an attention that rotates on its way: who rotates in which step, the same logits."""

from typing import Any

import msgspec
import pytest
import torch
from one_request import OneRequest
from rig import TINY, tiny_model
from torch import Tensor

from lockstep.worker.attention.base import AttentionBackend
from lockstep.worker.config import ModelConfig
from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.kernels.ops import norm_rope_
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.rotation import Rotation

NORMED = msgspec.structs.replace(TINY, architecture="Qwen3ForCausalLM", qk_norm=True)
PROMPT, ANSWER = [5, 17, 3, 80, 41], [12, 9, 44]


class Rotating:
    """Rotates to ``context_lens - 1`` in decode form; ``rotated`` tells of each call if it did."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.rotated: list[bool] = []

    def rotates(self, metadata: AttentionMetadata, num_tokens: int) -> bool:
        return metadata.is_decode(num_tokens)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer_kv: tuple[Tensor, Tensor],
        metadata: AttentionMetadata, *, rotation: Rotation | None, **options: Any,
    ) -> None:  # fmt: skip
        self.rotated.append(rotation is not None)
        if rotation is not None:
            positions = (metadata.context_lens - 1).long()
            norm_rope_(q, k, positions, rotation.cos_sin, rotation.weights, rotation.eps)
        self._backend.forward(q, k, v, layer_kv, metadata, **options)


def logits(model: DecoderModel) -> Tensor:
    """Of a prompt in one step, then a token a step."""
    request = OneRequest(model)
    return torch.cat([request.forward(PROMPT), *(request.forward([token]) for token in ANSWER)])


@pytest.mark.parametrize("config", [TINY, NORMED], ids=["plain", "normed"])
def test_decode_steps_leave_the_rotation_to_an_attention_that_can(config: ModelConfig) -> None:
    model = tiny_model(config)
    expected = logits(model)
    attentions = [layer.self_attn.attention for layer in model.model.layers]
    rotating = Rotating(attentions[0].backend)
    for attention in attentions:
        attention.backend = rotating
    assert logits(model).equal(expected)
    by_layer = len(attentions)
    assert rotating.rotated == [False] * by_layer + [True] * by_layer * len(ANSWER)
