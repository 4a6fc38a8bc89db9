"""The graphs of a rank's steps: bodies, whole or in segments, and a tail per sampling variant."""

from bisect import bisect_left
from collections.abc import Callable, Mapping

from torch import Tensor

from lockstep.worker.forward import ForwardInputs
from lockstep.worker.graphs.dispatch import BatchDescriptor
from lockstep.worker.graphs.errors import GraphError
from lockstep.worker.graphs.manifest import Manifest
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.graphs.runner import GraphRunner, Parts
from lockstep.worker.kv_cache import KVCache
from lockstep.worker.sampler import SampleOutput
from lockstep.worker.sampling_state import LaneSampling, Variant
from lockstep.worker.segments import Segments
from lockstep.worker.state import StepState
from lockstep.worker.step import Step
from lockstep.worker.step_inputs import StepInputs

_BODY = "body"


class RankStatics:
    """Every tensor of a rank that a graph may hold the address of."""

    def __init__(
        self, state: StepState, sampling: LaneSampling, kv: KVCache, segments: Segments | None
    ) -> None:
        self._state = state
        self._sampling = sampling
        self._kv = kv
        self._segments = segments

    @property
    def generation(self) -> int:
        return self._state.generation

    def statics(self) -> Mapping[str, Tensor]:
        own, sampling = self._state.statics(), self._sampling.statics()
        flow = self._segments.flow.statics() if self._segments else {}
        return own | sampling | flow | {"kv_cache": self._kv.storage}


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
        self._segments: Segments | None = None
        self.sizes: list[int] = []  # of decode graphs, ascending
        # By the lanes that a tail is for, rising: the graphs that it is captured among.
        self._tails: dict[int, BatchDescriptor] = {}
        self._tail_lanes: list[int] = []  # of the tails captured so far

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
        """Capture the early part of ``manifest``, all ranks of the lockstep group together."""
        step, split = self._step, manifest.sizes(RunMode.PIECEWISE)
        if split:
            self._segments = Segments(step.model, step.kv, max(split))
        self._tails = _homes_of_tails(manifest, step.state.max_lanes)
        statics = RankStatics(step.state, self._sampling, step.kv, self._segments)
        self._runner.capture_all(manifest, self._parts, statics, progress)
        self._note_sizes()

    def capture_next(self, position: int) -> BatchDescriptor:
        """Capture a late entry; see ``GraphRunner.capture_next``."""
        descriptor = self._runner.capture_next(position)
        self._note_sizes()
        return descriptor

    @property
    def descriptors(self) -> list[BatchDescriptor]:
        """What was captured, by rising size."""
        return sorted(self._runner.records, key=lambda each: each.num_tokens)

    def _note_sizes(self) -> None:
        captured = self._runner.records
        self.sizes = [key.num_tokens for key in self.descriptors if _is_decode(key)]
        self._tail_lanes = [lanes for lanes, home in self._tails.items() if home in captured]

    def tail_lanes(self, descriptor: BatchDescriptor) -> int:
        """How many lanes the tail among these graphs is for; 0 if there is none among them."""
        found = (lanes for lanes, home in self._tails.items() if home == descriptor)
        return next(found, 0)

    def body(self, num_lanes: int) -> None:
        """Replay the decode body of exactly ``num_lanes`` lanes.

        Raises:
            GraphError: this size was not captured.
            StaleGraphError: a static tensor has moved.
        """
        self._runner.replay(_decode_key(num_lanes), _BODY)

    def mixed_body(self, num_tokens: int) -> None:
        """Replay the body of exactly ``num_tokens`` tokens of any lanes; raises as ``body``."""
        self._runner.replay(self._mixed_key(num_tokens), _BODY)

    def pieces(self, inputs: ForwardInputs) -> None:
        """A body of segments that are replayed and attentions that are called; raises as ``body``.

        Args:
            inputs: padded to a size that was captured in segments.
        """
        step, segments = self._step, self._segments
        key = BatchDescriptor(len(inputs.token_ids), None, 0)
        if segments is None:
            raise GraphError(f"size {key.num_tokens} was not captured in segments")
        step.begin()
        flow = segments.load(inputs)
        self._runner.replay_in_turn(
            key, segments.names, lambda index: segments.attend(index, flow, inputs)
        )
        step.leave_logits(flow.hidden, inputs.logit_rows)

    def tail(self, num_lanes: int, variant: Variant) -> SampleOutput | None:
        """The tail by the graph of the next larger size, or eagerly: then the output is returned.

        Rows beyond ``num_lanes`` sample nothing, so the larger graph does the same.
        """
        at = bisect_left(self._tail_lanes, num_lanes)
        if at == len(self._tail_lanes) or variant not in self.captured_variants:
            return self._step.tail(num_lanes, variant)
        self._runner.replay(self._tails[self._tail_lanes[at]], _tail(variant))
        return None

    def release(self) -> None:
        """Drop all graphs; comes before the topology is destroyed."""
        self._runner.release()
        self._segments = None
        self.sizes, self._tail_lanes, self._tails = [], [], {}

    def _parts(self, descriptor: BatchDescriptor) -> Parts:
        num_tokens, num_lanes = descriptor.num_tokens, descriptor.num_reqs
        tails = self._tail_parts(self.tail_lanes(descriptor))
        if num_lanes is None:
            assert self._segments is not None
            return {**self._segments.parts(num_tokens), **tails}
        if not _is_decode(descriptor):
            return {_BODY: lambda: self._step.body(self._any_lanes(num_tokens, num_lanes))} | tails
        return {_BODY: lambda: self._step.body(self._inputs.decode(num_lanes))} | tails

    def _tail_parts(self, num_lanes: int) -> dict[str, Callable[[], None]]:
        if not num_lanes:
            return {}
        return {_tail(each): self._tail_part(num_lanes, each) for each in self.captured_variants}

    def _any_lanes(self, num_tokens: int, num_lanes: int) -> ForwardInputs:
        # A graph holds for every batch of its size: one lane may have all tokens.
        return self._inputs.mixed(num_tokens, num_lanes, max_query_len=max(2, num_tokens))

    def _tail_part(self, num_lanes: int, variant: Variant) -> Callable[[], None]:
        return lambda: _ignore(self._step.tail(num_lanes, variant))

    def _mixed_key(self, num_tokens: int) -> BatchDescriptor:
        return BatchDescriptor(num_tokens, min(num_tokens, self._step.state.max_lanes), 0)


def _homes_of_tails(manifest: Manifest, max_lanes: int) -> dict[int, BatchDescriptor]:
    """Tails are for lanes, not tokens: with decode graphs one a size, else the least that has them.

    Modes without decode graphs need tails as much: an eager one allocates while serving.
    """
    every = sorted((each.descriptor for each in manifest.entries), key=lambda d: d.num_tokens)
    homes = dict[int, BatchDescriptor]()
    for each in [each for each in every if _is_decode(each)] or every:
        lanes = each.num_reqs if each.num_reqs is not None else min(each.num_tokens, max_lanes)
        homes.setdefault(lanes, each)
    return homes


def _is_decode(descriptor: BatchDescriptor) -> bool:
    return descriptor.uniform_query_len > 0


def _decode_key(num_lanes: int) -> BatchDescriptor:
    return BatchDescriptor(num_lanes, num_lanes, 1)


def _tail(variant: Variant) -> str:
    return f"tail {variant.name}"


def _ignore(output: SampleOutput) -> None:
    """A captured tail leaves everything in static tensors."""
