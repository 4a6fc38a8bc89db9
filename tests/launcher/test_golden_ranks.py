"""SmolLM2 gives the golden tokens over many ranks: nine query heads, more ranks than groups."""

import os

import golden
import pytest

ASKED = "LOCKSTEP_TEST_RANKS"
NUM_RANKS = int(os.environ.get(ASKED, "4"))
SHAPES = [f"{tp}x{NUM_RANKS // tp}" for tp in range(NUM_RANKS, 1, -1) if NUM_RANKS % tp == 0]


@pytest.mark.skipif(ASKED not in os.environ, reason=f"make ranks: {ASKED} is not set")
@pytest.mark.ray
@pytest.mark.timeout(golden.TIMEOUT_S + 100)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout_gives_the_golden_tokens(shape: str) -> None:
    first = {axis: values[0] for axis, values in golden.AXES.items()}
    verdict = golden.run(first | {"shape": shape})
    assert verdict.difference == ""
