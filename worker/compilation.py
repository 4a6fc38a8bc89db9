"""``--compile``: torch.compile of the segments, all of it before anything is captured or served."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch

from lockstep.worker.flow import Flow
from lockstep.worker.graphs.guard import unguarded
from lockstep.worker.models.decoder import DecoderModel, SegmentFunctions

_BACKEND = "inductor"
# One token is compiled for itself, all other numbers together: from one that is no size of a
# model, since the compiler takes equal sizes for the same.
_LENGTHS = (61, 1)


class CompiledFunction:
    """A function compiled for any number of tokens; once sealed it refuses to compile again.

    Graphs are captured around it, so it is called with their guards paused: what a compiler takes
    in whole asks the device nothing.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = torch.compile(fn, dynamic=True, backend=_BACKEND)
        self._stance = "default"

    def __call__(self, *args: object) -> Any:
        with unguarded(), torch.compiler.set_stance(self._stance):
            return self._fn(*args)

    def seal(self) -> None:
        self._stance = "fail_on_recompile"


def compile_segments(model: DecoderModel) -> None:
    """Replace the model's segments by compiled ones, and run them once at each kind of length.

    All ranks that share the model call this together.

    Raises:
        ValueError: the device is a CPU, and there is no C++ compiler.
    """
    weight = model.model.norm.weight
    _check_compiler(weight.device)
    compiled = [CompiledFunction(fn) for fn in model.model.segments]
    model.model.segments = SegmentFunctions(*compiled)
    for num_tokens in _LENGTHS:
        _run(model, model.new_flow(num_tokens))
    for function in compiled:
        function.seal()


def _run(model: DecoderModel, flow: Flow) -> None:
    for index in range(model.num_layers + 1):
        model.run_segment(index, flow)


def _check_compiler(device: torch.device) -> None:
    name = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(name) is None:
        raise ValueError(f"compile needs a C++ compiler on a CPU: {name!r} (CXX) is not there")
