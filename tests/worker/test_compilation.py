"""Compiled segments: the same tokens in every mode, one compilation for all layers and lengths."""

import msgspec
import pytest
import torch
from inline import LOUD_TINY, dummy_model, request, serve, worker_config
from one_request import new_model
from rig import decode_alone, tiny_model
from torch import Tensor
from torch._dynamo.utils import counters

from lockstep.comm.collectives import Communicator
from lockstep.worker import compilation
from lockstep.worker.compilation import compile_segments
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.mode import RunMode

PROMPTS = {"a": [5, 17, 3], "b": [44, 9, 9, 61, 2, 80, 33, 12, 12, 7], "c": [12]}
NUM_LAYERS = 3


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch):
    """Traces and checks all that inductor would, and generates nothing: that takes a minute."""
    monkeypatch.setattr(compilation, "_BACKEND", "aot_eager")
    yield
    torch._dynamo.reset()


def requests():
    return [request(key, prompt, max_tokens=9) for key, prompt in PROMPTS.items()]


def config_of(**options: object) -> WorkerConfig:
    config = worker_config(**options)
    model = msgspec.structs.replace(LOUD_TINY, num_layers=NUM_LAYERS)
    return msgspec.structs.replace(config, model=model, compile=True)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    model = dummy_model(msgspec.structs.replace(config_of(), compile=False))
    return {key: decode_alone(model, prompt, 9) for key, prompt in PROMPTS.items()}


def test_every_mode_serves_the_tokens_without_compiling_again(expected) -> None:
    counters.clear()
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        config = config_of(graph_mode=mode, max_num_batched_tokens=9)
        served, _, worker = serve(config, requests())
        assert served.tokens == expected
        assert (worker.metrics.num_steps[RunMode.PIECEWISE] > 0) == ("PIECEWISE" in mode)
    # Three functions for one token and for any number, whatever the layer, mode and batch.
    assert counters["stats"]["unique_graphs"] == 6


def test_what_would_have_to_be_compiled_while_serving_is_refused() -> None:
    model = tiny_model()
    compile_segments(model)
    flow = model.new_flow(7)
    model.run_segment(0, flow)
    model.double()
    with pytest.raises(RuntimeError, match="recompile"):
        model.run_segment(0, flow)


def test_without_a_compiler_the_start_says_what_is_missing(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(ValueError, match="compile needs a C.. compiler on a CPU: '/nowhere/c"):
        serve(config_of(), requests())


class Counting(Communicator):
    """One of two ranks, whose peer adds nothing."""

    def __init__(self) -> None:
        super().__init__(None)
        self.size, self.num_sums = 2, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return x


def test_ranks_sum_between_what_is_compiled_in_every_step() -> None:
    tp = Counting()
    model = new_model(LOUD_TINY, tp.outside_compilation())
    compile_segments(model)
    for num_tokens in (1, 5, 9):
        before = tp.num_sums
        for index in range(model.num_layers + 1):
            model.run_segment(index, model.new_flow(num_tokens))
        assert tp.num_sums - before == 1 + 2 * model.num_layers
