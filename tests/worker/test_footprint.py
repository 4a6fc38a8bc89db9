"""Bytes of a step: against the modules that hold the weights, and against published shapes."""

from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from lockstep.worker.config import ModelConfig
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.models.footprint import Footprint


def shape(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: object
) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", hidden_size=hidden, intermediate_size=inner,
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, vocab_size=vocab,
        max_position_embeddings=64, **{"head_dim": 128, "dtype": "bfloat16", **more},
    )  # fmt: skip


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "dtype": "float32"},
        {"qk_norm": True, "tie_embeddings": True},
    ],
)
def test_weights_are_those_of_the_modules(tp_size: int, more: dict) -> None:
    config = shape(48, 32, 3, 9, 3, 101, head_dim=8, **more)
    tp = SimpleNamespace(size=tp_size, rank=0)
    dtype = getattr(torch, config.dtype)
    model = DecoderModel(config, tp, None, torch.device("meta"), dtype)
    sizes = {name: each.numel() * each.itemsize for name, each in model.named_parameters()}
    embedding = sizes.pop("model.embed_tokens.table") - 2 * 48 * dtype.itemsize
    head = embedding if config.tie_embeddings else 0
    footprint = Footprint(config, tp_size)
    assert footprint.step_weight_bytes == sum(sizes.values()) + head
    assert footprint.weight_bytes == sum(sizes.values()) + embedding
    kv_bytes = 3 * 2 * model.num_kv_heads_local * 8 * dtype.itemsize
    assert footprint.kv_bytes_per_token == kv_bytes


@pytest.mark.parametrize(
    ("config", "step_gb", "kv_kib"),
    [
        (shape(1024, 3072, 28, 16, 8, 151936, qk_norm=True, tie_embeddings=True), 1.192, 112),
        (shape(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_embeddings=True), 2.472, 32),
        (shape(4096, 14336, 32, 32, 8, 128256), 15.01, 128),
        (shape(5120, 25600, 64, 64, 8, 151936, qk_norm=True), 63.97, 256),
    ],
    ids=["Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.1-8B", "Qwen3-32B"],
)
def test_published_shapes(config: ModelConfig, step_gb: float, kv_kib: int) -> None:
    footprint = Footprint(config)
    assert footprint.step_weight_bytes / 1e9 == pytest.approx(step_gb, rel=5e-4)
    assert footprint.kv_bytes_per_token == kv_kib << 10


def test_a_window_bounds_what_its_layers_read() -> None:
    config = structs.replace(
        shape(64, 64, 4, 4, 2, 100, head_dim=8),
        sliding_window=10,
        window_layers=(True, False, True, False),
    )
    layer = 2 * 2 * 8 * 2
    assert Footprint(config).kv_read_bytes(6) == 4 * 6 * layer
    assert Footprint(config).kv_read_bytes(100) == (2 * 10 + 2 * 100) * layer


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="must divide intermediate_size=64, got 3"):
        Footprint(shape(64, 64, 1, 9, 3, 100), 3)
