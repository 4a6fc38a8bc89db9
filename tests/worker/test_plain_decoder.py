"""The plain decoder against transformers: it is the truth that served answers are held to."""

import hf_models
import pytest
import torch

from lockstep.worker.models.plain import PlainDecoder
from lockstep.worker.weights.model_config import model_config_from
from lockstep.worker.weights.safetensors import SafetensorsSource

CPU = torch.device("cpu")
IDS = torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "case", ["llama-scaled-tied", "llama-linear-bias", "qwen2-windows", "qwen3-windows-bias"]
)
def test_logits_are_those_of_transformers(case: str, tmp_path) -> None:
    oracle = hf_models.make(case)
    hf_models.save(oracle, tmp_path)
    source, config = SafetensorsSource(tmp_path), model_config_from(tmp_path)
    float32 = torch.float32
    plain = PlainDecoder(config, source, CPU, weight_dtype=float32, dtype=float32)
    expected = torch.stack([hf_models.logits(oracle, row.tolist()) for row in IDS])
    torch.testing.assert_close(plain.logits(IDS, 24), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(plain.logits(IDS, 5), expected[:, -5:], atol=1e-4, rtol=0)


def test_weights_are_rounded_first_and_arithmetic_is_as_wide_as_asked(tmp_path) -> None:
    oracle = hf_models.make("qwen3")
    hf_models.save(oracle, tmp_path)
    source, config = SafetensorsSource(tmp_path), model_config_from(tmp_path)

    def logits(dtype: torch.dtype) -> torch.Tensor:
        rounded = PlainDecoder(config, source, CPU, weight_dtype=torch.bfloat16, dtype=dtype)
        return rounded.logits(IDS, 24)

    for parameter in oracle.parameters():
        parameter.data = parameter.data.bfloat16().float()
    wide, half = logits(torch.float32), logits(torch.bfloat16)
    expected = torch.stack([hf_models.logits(oracle, row.tolist()) for row in IDS])
    torch.testing.assert_close(wide, expected, atol=1e-4, rtol=0)
    assert half.dtype is torch.float32
    assert 0.01 < (half - expected).abs().mean() < 1
    assert logits(torch.float64).dtype is torch.float64
