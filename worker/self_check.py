"""Does every graph that was just captured do what its step does?"""

import torch
from torch import Tensor

from lockstep.worker.graphs.errors import GraphError
from lockstep.worker.model_runner import RunnerParts
from lockstep.worker.sampling_state import Variant

_NUM_PROBES = 2
# Far above rounding in bfloat16, far below what reading a wrong place gives.
_TOLERANCE = 0.1


class SelfCheck:
    """Replays every graph on probe tokens and calls its step on the same, before anyone is served.

    All lanes hold the same token at position 0 of the padding block, so all rows are equal and it
    does not matter that they write to one slot. Leaves the state in need of ``clear``.
    """

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._state = parts.state

    def run(self, vocab_size: int) -> None:
        """Check all sizes of a device.

        Raises:
            GraphError: names the size whose replay differs from its step or ignores its input.
        """
        probes = sorted({(i + 1) * vocab_size // (_NUM_PROBES + 1) for i in range(_NUM_PROBES)})
        sizes = self._parts.graphs.sizes
        # The host replays by calling: one size shows that, and a CPU has no time for all.
        for size in sizes if self._state.device.type == "cuda" else sizes[:1]:
            self._check_body(size, probes)
            for variant in self._parts.graphs.captured_variants:
                self._check_tail(size, probes[0], variant)

    def _check_body(self, size: int, probes: list[int]) -> None:
        expected = [self._eager_logits(size, token) for token in probes]
        replayed = [self._replayed_logits(size, token) for token in probes]
        for token, wanted, found in zip(probes, expected, replayed, strict=True):
            difference = _largest_difference(wanted, found)
            if not difference <= _TOLERANCE:
                raise GraphError(
                    f"the graph of size {size} differs from its step by {difference:.3g} "
                    f"(of the largest logit) at token {token}"
                )
        reacts = not all(torch.equal(replayed[0], other) for other in replayed[1:])
        if len(probes) > 1 and not reacts:
            raise GraphError(f"the graph of size {size} gives the same whatever its input")
        if not torch.equal(self._replayed_logits(size, probes[0]), replayed[0]):
            raise GraphError(f"the graph of size {size} gives two answers to one input")

    def _check_tail(self, size: int, token: int, variant: Variant) -> None:
        """A tail's output row, from the same logits and lanes."""
        parts, ring = self._parts, self._state.output
        self._eager_logits(size, token)
        rows = []
        for tail in (parts.step.tail, parts.graphs.tail):
            self._fill_lanes(size, token)
            parts.sampling.reset_rows(range(size))
            step = int(ring.counter)
            tail(size, variant)
            rows.append(ring.row(step)[:, :size].clone())
        if not torch.equal(*rows):
            raise GraphError(f"the {variant.name} tail of size {size} differs from its step")

    def _eager_logits(self, size: int, token: int) -> Tensor:
        self._fill_lanes(size, token)
        self._state.logits.zero_()
        self._parts.step.body(self._parts.inputs.decode(size))
        return self._state.logits[:size].clone()

    def _replayed_logits(self, size: int, token: int) -> Tensor:
        self._fill_lanes(size, token)
        self._state.logits.zero_()
        self._parts.graphs.body(size)
        return self._state.logits[:size].clone()

    def _fill_lanes(self, size: int, token: int) -> None:
        state = self._state
        for flags in (state.active, state.samples):
            flags.zero_()[:size].fill_(True)
        state.last_token.fill_(token)
        state.num_computed.zero_()


def _largest_difference(wanted: Tensor, found: Tensor) -> float:
    """Relative to the largest logit; -inf of the padded vocabulary must be in the same places."""
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    scale = wanted.where(finite, 0).abs().max()
    difference = (wanted - found).where(finite, 0).abs().max()
    return float(difference / scale.clamp(min=1e-6))
