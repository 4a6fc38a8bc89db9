"""The least time of a step, against bytes counted by hand for the packaged shapes."""

from pathlib import Path

import pytest

from lockstep.worker.models.floor import StepFloor, step_floor
from lockstep.worker.models.footprint import Footprint
from lockstep.worker.weights.model_config import model_config_from

SHAPES = Path(__file__).parents[1] / "data" / "models"

# Elements of a layer: qkv, o, three of the MLP, two norms (four with heads' own), times layers; the
# last norm; the LM head. Two bytes each. KV: layers x (k, v) x heads x head_dim x two bytes.
QWEN_LAYER = 1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
QWEN_BYTES = 2 * (28 * QWEN_LAYER + 1024 + 151936 * 1024)
LLAMA_LAYER = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096
LLAMA_BYTES = 2 * (32 * LLAMA_LAYER + 4096 + 128256 * 4096)


@pytest.mark.parametrize(
    ("name", "weights", "kv_of_a_token"),
    [
        ("qwen3-0.6b", QWEN_BYTES, 28 * 2 * 8 * 128 * 2),
        ("llama-3.1-8b", LLAMA_BYTES, 32 * 2 * 8 * 128 * 2),
    ],
)
def test_bytes_of_the_packaged_shapes(name: str, weights: int, kv_of_a_token: int) -> None:
    footprint = Footprint(model_config_from(SHAPES / name))
    assert step_floor(footprint, 8, 208) == StepFloor(weights, 8 * 208 * kv_of_a_token)


def test_two_ranks_halve_all_but_the_norms() -> None:
    footprint = Footprint(model_config_from(SHAPES / "llama-3.1-8b"), 2)
    norms = 2 * (32 * 2 * 4096 + 4096)
    expected = StepFloor((LLAMA_BYTES - norms) // 2 + norms, 1024 * (64 << 10))
    assert step_floor(footprint, 1, 1024) == expected


def test_time_and_share() -> None:
    floor = StepFloor(3_000_000_000, 1_000_000_000)
    assert floor.num_bytes == 4_000_000_000
    assert floor.ms(4e12) == pytest.approx(1.0)
    assert floor.share(step_ms=1.25, bytes_per_s=4e12) == pytest.approx(0.8)
