"""Operations of a chunk, against pairs counted one by one and against a published shape."""

from pathlib import Path

import pytest
from msgspec import structs

from lockstep.worker.models.arithmetic import ChunkFlops, chunk_flops
from lockstep.worker.models.footprint import Footprint
from lockstep.worker.weights.model_config import model_config_from

LLAMA = model_config_from(Path(__file__).parents[1] / "data" / "models" / "llama-3.1-8b")
# Of a layer: qkv, o, and three of the MLP.
LAYER = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336


@pytest.mark.parametrize("num_before", [0, 1, 5, 9, 40])
@pytest.mark.parametrize("num_tokens", [1, 4, 7, 30])
def test_attention_is_of_every_pair_that_a_layer_sees(num_tokens: int, num_before: int) -> None:
    config = structs.replace(
        LLAMA, num_layers=3, sliding_window=9, window_layers=(True, False, True)
    )
    chunk = range(num_before, num_before + num_tokens)
    everything = sum(token + 1 for token in chunk)
    window = sum(len([seen for seen in range(token + 1) if token - seen < 9]) for token in chunk)
    found = chunk_flops(Footprint(config), num_tokens, num_before)
    assert found.attention == 4 * 32 * 128 * (everything + 2 * window)


def test_a_published_shape() -> None:
    whole = chunk_flops(Footprint(LLAMA), 2048, 6144)
    assert whole.linear == 2 * 2048 * 32 * LAYER
    assert whole.total / 1e12 == pytest.approx(28.59 + 7.70, rel=1e-3)
    halves = chunk_flops(Footprint(LLAMA, 2), 2048, 6144)
    assert halves == ChunkFlops(whole.linear / 2, whole.attention / 2)


def test_chunks_add_up_to_their_prompt() -> None:
    footprint = Footprint(LLAMA)
    parts = [chunk_flops(footprint, 512, before) for before in (0, 512, 1024)]
    whole = chunk_flops(footprint, 1536, 0)
    assert sum(part.linear for part in parts) == whole.linear
    assert sum(part.attention for part in parts) == whole.attention
