"""A model that the ranks cannot share is refused before any rank is started."""

from pathlib import Path

import pytest

from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.resolve import resolve

QWEN = Path(__file__).parents[1] / "data" / "models" / "qwen3-0.6b"


def config_of(tp_size: int) -> LaunchConfig:
    return LaunchConfig(
        model=str(QWEN), load_format="dummy", tensor_parallel_size=tp_size, device="cpu"
    )


@pytest.mark.parametrize(
    ("tp_size", "message"),
    [
        (32, "^tensor_parallel_size must be at most num_heads=16, got 32$"),
        (5, "^tensor_parallel_size must divide intermediate_size=3072, got 5$"),
    ],
)
def test_refused_with_the_numbers(tp_size, message):
    with pytest.raises(ConfigError, match=message):
        resolve(config_of(tp_size))


def test_heads_that_do_not_divide_are_padded_instead():
    resolved = resolve(config_of(3))
    assert resolved.worker.parallel.tp_size == 3
