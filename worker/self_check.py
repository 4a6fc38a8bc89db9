"""Does every graph that was just captured do what its step does?"""

import torch
from torch import Tensor

from lockstep.worker.graphs.errors import GraphError
from lockstep.worker.step import Step
from lockstep.worker.step_graphs import StepGraphs
from lockstep.worker.step_inputs import StepInputs

_NUM_PROBES = 3
# Far above rounding in bfloat16, far below what reading a wrong place gives.
_TOLERANCE = 0.1


class SelfCheck:
    """Replays bodies on probe tokens and calls them eagerly on the same, before anyone is served.

    Every lane holds the same token at position 0 of the padding block, so all rows are equal and
    it does not matter that they write to one slot. Leaves the state in need of ``clear``.
    """

    def __init__(self, graphs: StepGraphs, step: Step, inputs: StepInputs) -> None:
        self._graphs = graphs
        self._step = step
        self._inputs = inputs

    def run(self, vocab_size: int) -> None:
        """Check all sizes.

        Raises:
            GraphError: names the size whose replay differs from its step or ignores its input.
        """
        probes = sorted({(i + 1) * vocab_size // (_NUM_PROBES + 1) for i in range(_NUM_PROBES)})
        for size in self._graphs.sizes:
            self._check(size, probes)

    def _check(self, size: int, probes: list[int]) -> None:
        expected = [self._eager(size, token) for token in probes]
        replayed = [self._replay(size, token) for token in probes]
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
        if not torch.equal(self._replay(size, probes[0]), replayed[0]):
            raise GraphError(f"the graph of size {size} gives two answers to one input")

    def _eager(self, size: int, token: int) -> Tensor:
        self._set(size, token)
        self._step.body(self._inputs.decode(size))
        return self._take(size)

    def _replay(self, size: int, token: int) -> Tensor:
        self._set(size, token)
        self._graphs.body(size)
        return self._take(size)

    def _set(self, size: int, token: int) -> None:
        state = self._step.state
        for flags in (state.active, state.samples):
            flags.zero_()[:size].fill_(True)
        state.last_token.fill_(token)
        state.num_computed.zero_()
        state.logits.zero_()

    def _take(self, size: int) -> Tensor:
        return self._step.state.logits[:size].clone()


def _largest_difference(wanted: Tensor, found: Tensor) -> float:
    """Of one row to the other, relative to the largest logit; padded vocabulary is left out."""
    finite = wanted.isfinite() & found.isfinite()
    if not torch.equal(finite, wanted.isfinite()) or not torch.equal(finite, found.isfinite()):
        return float("inf")
    scale = wanted.where(finite, 0).abs().max()
    difference = (wanted - found).where(finite, 0).abs().max()
    return float(difference / scale.clamp(min=1e-6))
