"""Live lanes out of the way while a graph is captured between two of their steps."""

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.worker.sampling_state import LaneSampling
from lockstep.worker.state import StepState


@contextmanager
def lanes_set_aside(state: StepState, sampling: LaneSampling) -> Iterator[None]:
    """No lanes inside, and afterwards every lane as it was, bit for bit.

    No step may be in flight. What is kept goes to the host: a device that is filled to its budget
    has no room for a second copy. Logits are not kept, since every step makes its own.
    """
    kept_state, kept_sampling = state.keep(), sampling.keep()
    state.clear()
    yield
    state.put_back(kept_state)
    sampling.put_back(kept_sampling)
