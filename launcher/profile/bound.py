"""What a step waits for: the launches of its operations, the device, or the rest of the host."""

from typing import Literal

import msgspec

Bound = Literal["launch-bound", "GPU-bound", "CPU-bound", "host-bound"]
DeviceName = Literal["GPU", "CPU"]


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What one step takes; times in microseconds.

    ``num_operations`` run on the device, handed over in ``num_submissions``, each of which costs
    ``launch_us`` at least. ``device_us`` is what the device is busy for, ``host_us`` what the rank
    needs to launch the step, its Python included, and ``step_us`` what passes by the clock.
    """

    device: DeviceName
    num_operations: int
    num_submissions: int
    launch_us: float
    device_us: float
    host_us: float
    step_us: float

    @property
    def launches_us(self) -> float:
        """The least time in which the step can be submitted."""
        return self.num_submissions * self.launch_us

    @property
    def bound(self) -> Bound:
        """Launches come first: where they alone outlast the device, no faster Python helps."""
        if self.launches_us > self.device_us:
            return "launch-bound"
        if self.host_us > self.device_us:
            return "host-bound"
        return "GPU-bound" if self.device == "GPU" else "CPU-bound"


def explain(costs: StepCosts) -> str:
    """The bound as a sentence with its numbers."""
    launches = (
        f"{costs.num_submissions} launches x {costs.launch_us:.2f} us = {_ms(costs.launches_us)}"
    )
    device = f"{_ms(costs.device_us)} of work on the {costs.device}"
    host = f"the host takes {_ms(costs.host_us)} a step"
    if costs.bound == "launch-bound":
        return f"launch-bound: {launches}, more than {device}; {host}"
    if costs.bound == "host-bound":
        return f"host-bound: {host}, more than {device}; {launches} are the least of it"
    return f"{costs.bound}: {device}, more than {launches}; {host}"


def compare(eager: StepCosts, graphs: StepCosts) -> str:
    """What graphs change."""
    ratio = eager.step_us / graphs.step_us
    return (
        f"{eager.num_submissions} submissions become {graphs.num_submissions}, and a step of "
        f"{_ms(eager.step_us)} one of {_ms(graphs.step_us)} ({ratio:.2f} times as fast)"
    )


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.3f} ms"
