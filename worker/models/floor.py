"""The least time of a decode step: what it must read over how fast that can be read. No torch."""

import msgspec

from lockstep.worker.models.footprint import Footprint


class StepFloor(msgspec.Struct, frozen=True):
    """Bytes that one rank must read in a step: weights once, keys and values of every request.

    Arithmetic, launches and communication come on top of the time that this takes.
    """

    weight_bytes: int
    kv_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def ms(self, bytes_per_s: float) -> float:
        """Milliseconds at that bandwidth."""
        return self.num_bytes / bytes_per_s * 1e3

    def share(self, step_ms: float, bytes_per_s: float) -> float:
        """How much of that bandwidth a step reached that took ``step_ms``; 1 is the floor."""
        return self.ms(bytes_per_s) / step_ms


def step_floor(footprint: Footprint, num_reqs: int, context_len: int) -> StepFloor:
    """The floor of a step of so many requests.

    Args:
        context_len: tokens that each attends to, this step's included.
    """
    kv_bytes = num_reqs * footprint.kv_read_bytes(context_len)
    return StepFloor(footprint.step_weight_bytes, kv_bytes)
