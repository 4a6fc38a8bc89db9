"""Whole steps of a worker that attends by FlashInfer, beside those of one that does by Triton."""

from collections.abc import Iterator

import msgspec
import pytest
from gpu_rig import MAX_LANES, GpuRig, gpu_config
from torch import Tensor

from lockstep.worker.attention.registry import find_backend
from lockstep.worker.graphs.mode import RunMode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(find_backend("flashinfer").missing), reason="needs flashinfer"),
]


@pytest.fixture
def rigs() -> Iterator[list[GpuRig]]:
    """All lanes prefilled, on FlashInfer and on Triton."""
    config = gpu_config(dtype="bfloat16", graph_mode="PIECEWISE")
    names = ("flashinfer", "triton")
    made = [GpuRig(msgspec.structs.replace(config, attention_backend=name)) for name in names]
    for rig in made:
        rig.prefill(MAX_LANES)
    yield made
    for rig in made:
        rig.close()


def assert_same_logits(rigs: list[GpuRig]) -> None:
    """Within the rounding of bfloat16; then both go on from the same tokens."""
    num_lanes = len(rigs[0].lens)
    found, expected = (rig.parts.state.logits[:num_lanes] for rig in rigs)
    assert found.isfinite().all()
    assert _largest_difference(found, expected) < 0.05
    rigs[0].parts.state.last_token.copy_(rigs[1].parts.state.last_token)


def _largest_difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_prompts_and_decode_steps_have_the_logits_of_triton(rigs: list[GpuRig]) -> None:
    """Eager steps, and steps of replayed segments with attention between them."""
    assert_same_logits(rigs)
    for step in range(20):
        flashinfer, triton = rigs
        flashinfer.decode(RunMode.PIECEWISE if step % 2 else RunMode.EAGER, MAX_LANES)
        triton.decode(RunMode.EAGER, MAX_LANES)
        assert_same_logits(rigs)


def test_padded_steps_are_not_disturbed_by_nan_in_dead_slots(rigs: list[GpuRig]) -> None:
    for rig in rigs:
        rig.keep(5)
    assert_same_logits(rigs)
    for _ in range(4):
        dead = ~rigs[0].live_slots()
        storage = rigs[0].kv.storage[: rigs[0].kv.num_blocks]
        storage.masked_fill_(dead[:, None, None, :, None, None], float("nan"))
        for rig in rigs:
            rig.decode(RunMode.EAGER, 8)
        assert_same_logits(rigs)


def test_a_worker_that_would_capture_it_is_refused(rigs: list[GpuRig]) -> None:
    config = msgspec.structs.replace(gpu_config(dtype="bfloat16"), attention_backend="flashinfer")
    with pytest.raises(ValueError, match="cannot be served with attention_backend 'flashinfer'"):
        GpuRig(config)
