"""When each step began and ended, written by the step itself where it runs."""

import time

import torch
from torch import Tensor

from lockstep.comm.messages import DeviceTimes

BEGIN, END = 0, 1


class StepClock:
    """The last ``depth`` steps, by a counter on the device: replays find their row by themselves.

    On CUDA the first and the last kernel of a step read the device's nanosecond timer; on a CPU
    it is ``time.perf_counter_ns``, in the same places.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self.depth = depth
        self.times = torch.zeros(depth, 2, dtype=torch.int64, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        # Made here: numpy's look at host memory is one that a capture would forbid.
        self._host = (self.times.numpy(), self.counter.numpy()) if device.type == "cpu" else None

    def begin(self) -> None:
        self._stamp(BEGIN)

    def end(self) -> None:
        self._stamp(END)

    def read(self) -> DeviceTimes:
        """The steps so far; waits for the device, so call it while nothing runs."""
        num_steps = int(self.counter)
        kept = range(max(0, num_steps - self.depth), num_steps)
        rows = self.times.cpu()[[step % self.depth for step in kept]]
        return DeviceTimes(num_steps, rows[:, BEGIN].tolist(), rows[:, END].tolist())

    def statics(self) -> dict[str, Tensor]:
        return {"step_times": self.times, "step_counter": self.counter}

    def _stamp(self, which: int) -> None:
        if self._host is None:
            from lockstep.worker.kernels.stamp import stamp

            return stamp(self.times, self.counter, which)
        times, counter = self._host
        times[counter[0] % self.depth, which] = time.perf_counter_ns()
        counter[0] += which
