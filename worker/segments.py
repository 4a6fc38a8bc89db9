"""A forward pass cut at its attentions: segments for graphs, with the attentions between them."""

from collections.abc import Callable

from lockstep.worker.flow import Flow
from lockstep.worker.forward import ForwardInputs
from lockstep.worker.kv_cache import KVCache
from lockstep.worker.step import Model


class Segments:
    """All sizes share one flow, since steps follow each other on one stream.

    Args:
        num_tokens: of the largest step.
    """

    def __init__(self, model: Model, kv: KVCache, num_tokens: int) -> None:
        self._model = model
        self._kv = kv
        self.flow = model.new_flow(num_tokens)
        self.names = tuple(f"segment {index}" for index in range(model.num_layers + 1))

    def parts(self, num_tokens: int) -> dict[str, Callable[[], None]]:
        """The segments of a step of so many tokens, padding included, by name and in order."""
        flow = self.flow.first(num_tokens)
        return {name: self._segment(index, flow) for index, name in enumerate(self.names)}

    def load(self, inputs: ForwardInputs) -> Flow:
        """Make a step the current one; returns its rows of the flow."""
        flow = self.flow.first(len(inputs.token_ids))
        flow.load(inputs)
        return flow

    def attend(self, index: int, flow: Flow, inputs: ForwardInputs) -> None:
        """The attention behind segment ``index``, eagerly, over the step's own metadata."""
        self._model.attend(index, flow, inputs.attention, self._kv)

    def _segment(self, index: int, flow: Flow) -> Callable[[], None]:
        return lambda: self._model.run_segment(index, flow)
