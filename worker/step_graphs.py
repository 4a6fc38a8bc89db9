"""The graphs of a rank's steps: a body and a tail per sampling variant, for each decode size."""

from bisect import bisect_left
from collections.abc import Callable, Mapping

from torch import Tensor

from lockstep.worker.graphs.dispatch import BatchDescriptor
from lockstep.worker.graphs.manifest import Manifest
from lockstep.worker.graphs.runner import GraphRunner
from lockstep.worker.kv_cache import KVCache
from lockstep.worker.sampler import SampleOutput
from lockstep.worker.sampling_state import LaneSampling, Variant
from lockstep.worker.state import StepState
from lockstep.worker.step import Step
from lockstep.worker.step_inputs import StepInputs

_BODY = "body"


class RankStatics:
    """Every tensor of a rank that a graph may hold the address of."""

    def __init__(self, state: StepState, sampling: LaneSampling, kv: KVCache) -> None:
        self._state = state
        self._sampling = sampling
        self._kv = kv

    @property
    def generation(self) -> int:
        return self._state.generation

    def statics(self) -> Mapping[str, Tensor]:
        own, sampling = self._state.statics(), self._sampling.statics()
        return own | sampling | {"kv_cache": self._kv.storage}


class StepGraphs:
    """Replays what was captured and calls the rest: the same functions either way.

    Args:
        runner: holds the graphs; without a capture every step is eager.
    """

    def __init__(
        self, runner: GraphRunner, step: Step, inputs: StepInputs, sampling: LaneSampling
    ) -> None:
        self._runner = runner
        self._step = step
        self._inputs = inputs
        self._sampling = sampling
        self.sizes: list[int] = []  # ascending

    @property
    def num_graphs(self) -> int:
        return sum(len(record.parts) for record in self._runner.records.values())

    @property
    def captured_variants(self) -> list[Variant]:
        """All but LOGPROBS: its output leaves in tensors that may not be pool memory."""
        return [v for v in self._sampling.variants() if v is not Variant.LOGPROBS]

    def capture(
        self, manifest: Manifest, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Capture all of ``manifest``, together with the other ranks of the lockstep group."""
        step = self._step
        statics = RankStatics(step.state, self._sampling, step.kv)
        self._runner.capture_all(manifest, self._parts, statics, progress)
        self.sizes = sorted(key.num_tokens for key in self._runner.records)

    def body(self, num_lanes: int) -> None:
        """Replay the body of exactly ``num_lanes`` lanes.

        Raises:
            GraphError: this size was not captured.
            StaleGraphError: a static tensor has moved.
        """
        self._runner.replay(_key(num_lanes), _BODY)

    def tail(self, num_lanes: int, variant: Variant) -> SampleOutput | None:
        """The tail by the graph of the next larger size, or eagerly: then the output is returned.

        Rows beyond ``num_lanes`` sample nothing, so the larger graph does the same.
        """
        at = bisect_left(self.sizes, num_lanes)
        key = _key(self.sizes[at]) if at < len(self.sizes) else _key(num_lanes)
        if not self._runner.captured(key, _tail(variant)):
            return self._step.tail(num_lanes, variant)
        self._runner.replay(key, _tail(variant))
        return None

    def release(self) -> None:
        """Drop all graphs; comes before the topology is destroyed."""
        self._runner.release()
        self.sizes = []

    def _parts(self, descriptor: BatchDescriptor) -> dict[str, Callable[[], None]]:
        num_lanes = descriptor.num_tokens

        def body() -> None:
            self._step.body(self._inputs.decode(num_lanes))

        def tail(variant: Variant) -> Callable[[], None]:
            return lambda: _ignore(self._step.tail(num_lanes, variant))

        return {_BODY: body} | {_tail(each): tail(each) for each in self.captured_variants}


def _key(num_lanes: int) -> BatchDescriptor:
    return BatchDescriptor(num_lanes, num_lanes, 1)


def _tail(variant: Variant) -> str:
    return f"tail {variant.name}"


def _ignore(output: SampleOutput) -> None:
    """A captured tail leaves everything in static tensors."""
