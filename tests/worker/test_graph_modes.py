"""Random models of several architectures: every graph mode serves the tokens of eager steps."""

import random
from pathlib import Path

import hf_models
import msgspec
import pytest
from inline import request, serve, worker_config

from lockstep.comm.messages import AddRequest
from lockstep.worker.attention.registry import ADAPTERS
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.weights.model_config import model_config_from

# Windows, biases, normed heads of a size that is no power of two; scaled rope and tied weights.
CASES = ("qwen3-windows-bias", "llama-scaled-tied")
RAN = {
    "PIECEWISE": {RunMode.PIECEWISE},
    "FULL_AND_PIECEWISE": {RunMode.PIECEWISE, RunMode.FULL},
    "FULL": {RunMode.FULL},
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = hf_models.make(request.param)
    return hf_models.save(model, tmp_path_factory.mktemp("model"))


def requests(vocab_size: int) -> list[AddRequest]:
    """Prompts of 1 to 30 tokens that come in chunks beside decodes, a few of them sampled."""
    rng, adds = random.Random(7), []
    for number in range(14):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.choice([1, 2, 5, 9, 17, 30]))]
        options = {"temperature": 0.9, "top_k": 20, "seed": number} if number % 5 == 4 else {}
        adds.append(request(f"r{number}", prompt, max_tokens=rng.randrange(3, 14), **options))
    return adds


def config_of(checkpoint: Path, mode: str) -> WorkerConfig:
    """Twelve tokens a step at most, all of which have a graph."""
    config = worker_config(graph_mode=mode, max_num_batched_tokens=12)
    model = model_config_from(checkpoint)
    return msgspec.structs.replace(
        config, model=model, model_path=str(checkpoint), load_format="auto"
    )


def test_every_mode_gives_the_tokens_of_eager_steps(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = config_of(checkpoint, "NONE")
    adds = requests(eager.model.vocab_size)
    expected = serve(eager, adds)[0].tokens
    monkeypatch.setitem(ADAPTERS, "reference", "always_attention:AlwaysAttention")
    for mode, modes in RAN.items():
        served, _, worker = serve(config_of(checkpoint, mode), adds)
        assert served.tokens == expected, mode
        assert {run_mode for run_mode, steps in worker.metrics.num_steps.items() if steps} == modes
    assert len({tuple(tokens) for tokens in expected.values()}) > 10
