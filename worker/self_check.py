"""Does every graph that was just captured do what its step does?"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lockstep.worker.bodies import RunnerParts
from lockstep.worker.forward import ForwardInputs
from lockstep.worker.graphs.dispatch import BatchDescriptor
from lockstep.worker.graphs.errors import GraphError
from lockstep.worker.sampling_state import Variant

_NUM_PROBES = 2
# Far above rounding in bfloat16, far below what reading a wrong place gives.
_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class _Body:
    """A captured body both ways, over ``num_lanes`` lanes of ``query_len`` tokens each.

    ``start`` is the position of their first token. ``noise`` is what one replay may differ from
    another by: nothing, unless lanes read what others write to the same slots.
    """

    name: str
    num_lanes: int
    query_len: int
    start: int
    noise: float
    inputs: Callable[[], ForwardInputs]
    replay: Callable[[], None]


class SelfCheck:
    """Replays every graph on probe tokens and calls its step on the same, before anyone is served.

    All lanes hold the same tokens at the first positions of the padding block, so all rows are
    equal and it does not matter that they write to one slot. Leaves the state in need of ``clear``.
    """

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._state = parts.state

    def run(self, vocab_size: int) -> None:
        """Check all graphs of a device.

        Raises:
            GraphError: names the size whose replay differs from its step or ignores its input.
        """
        for descriptor in self._some():
            self.check(descriptor, vocab_size)

    def check(self, descriptor: BatchDescriptor, vocab_size: int) -> None:
        """Check one graph; raises as ``run``."""
        probes = sorted({(i + 1) * vocab_size // (_NUM_PROBES + 1) for i in range(_NUM_PROBES)})
        size = descriptor.num_tokens
        if not descriptor.uniform_query_len:
            split = descriptor.num_reqs is None
            self._check_body(self._split_body(size) if split else self._mixed_body(size), probes)
        else:
            self._check_body(self._decode_body(size), probes)
        num_lanes = self._parts.graphs.tail_lanes(descriptor)
        for variant in self._parts.graphs.captured_variants if num_lanes else ():
            self._check_tail(num_lanes, probes[0], variant)

    def _some(self) -> list[BatchDescriptor]:
        """The host replays by calling: one of a kind shows that, and a CPU has no time for all."""
        every = self._parts.graphs.descriptors
        if self._state.device.type == "cuda":
            return every
        least = {(each.num_reqs is None, each.uniform_query_len): each for each in every[::-1]}
        return list(least.values())

    def _decode_body(self, size: int) -> _Body:
        parts = self._parts
        inputs, replay = partial(parts.inputs.decode, size), partial(parts.graphs.body, size)
        return _Body(f"the graph of size {size}", size, 1, 0, 0.0, inputs, replay)

    def _mixed_body(self, size: int) -> _Body:
        """Two tokens a lane where they fit, so that prompts are tried, and padding behind them.

        Padding writes to slot 0, so the lanes begin behind it.
        """
        parts = self._parts
        query_len = min(2, size, max(1, parts.step.kv.block_size - 1))
        num_lanes = min(size // query_len, parts.state.max_lanes)
        inputs = partial(parts.inputs.mixed, size, num_lanes, 2)
        replay = partial(parts.graphs.mixed_body, size)
        name = f"the mixed graph of size {size}"
        return _Body(name, num_lanes, query_len, 1, _TOLERANCE, inputs, replay)

    def _split_body(self, size: int) -> _Body:
        body = self._mixed_body(size)
        return replace(
            body,
            name=f"the graph in segments of size {size}",
            replay=lambda: self._parts.graphs.pieces(body.inputs()),
        )

    def _check_body(self, body: _Body, probes: list[int]) -> None:
        expected = [self._called(body, token) for token in probes]
        replayed = [self._replayed(body, token) for token in probes]
        for token, wanted, found in zip(probes, expected, replayed, strict=True):
            difference = _largest_difference(wanted, found)
            if not difference <= _TOLERANCE:
                raise GraphError(
                    f"{body.name} differs from its step by {difference:.3g} "
                    f"(of the largest logit) at token {token}"
                )
        reacts = not all(torch.equal(replayed[0], other) for other in replayed[1:])
        if len(probes) > 1 and not reacts:
            raise GraphError(f"{body.name} gives the same whatever its input")
        again = _largest_difference(replayed[0], self._replayed(body, probes[0]))
        if not again <= body.noise:
            raise GraphError(f"{body.name} gives two answers to one input")

    def _check_tail(self, size: int, token: int, variant: Variant) -> None:
        """A tail's output row, from the same logits and lanes."""
        parts, ring, body = self._parts, self._state.output, self._decode_body(size)
        self._called(body, token)
        rows = []
        for tail in (parts.step.tail, parts.graphs.tail):
            self._fill(body, token)
            parts.sampling.reset_rows(range(size))
            step = int(ring.counter)
            tail(size, variant)
            rows.append(ring.row(step)[:, :size].clone())
        if not torch.equal(*rows):
            raise GraphError(f"the {variant.name} tail of size {size} differs from its step")

    def _called(self, body: _Body, token: int) -> Tensor:
        return self._logits(body, token, lambda: self._parts.step.body(body.inputs()))

    def _replayed(self, body: _Body, token: int) -> Tensor:
        return self._logits(body, token, body.replay)

    def _logits(self, body: _Body, token: int, run: Callable[[], None]) -> Tensor:
        self._fill(body, token)
        self._state.logits.zero_()
        run()
        return self._state.logits[: body.num_lanes].clone()

    def _fill(self, body: _Body, token: int) -> None:
        state, num_lanes = self._state, body.num_lanes
        for flags in (state.active, state.samples):
            flags.zero_()[:num_lanes].fill_(True)
        state.last_token.fill_(token)
        state.num_computed.fill_(body.start)
        state.query_lens.zero_()[:num_lanes].fill_(body.query_len)
        state.from_chunk.zero_()
        lanes = state.lane_ids[:num_lanes].long().repeat_interleave(body.query_len)
        state.token_lanes.zero_()[: len(lanes)].copy_(lanes)


def _largest_difference(wanted: Tensor, found: Tensor) -> float:
    """Relative to the largest logit; -inf of the padded vocabulary must be in the same places."""
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    scale = wanted.where(finite, 0).abs().max()
    difference = (wanted - found).where(finite, 0).abs().max()
    return float(difference / scale.clamp(min=1e-6))
