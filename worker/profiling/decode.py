"""Decode steps of a worker: how long they take, what the host does for one, what the device."""

import statistics
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from lockstep.comm.messages import ReplicaPlan
from lockstep.worker.bare_steps import BareSteps
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.profiling.operation import Operation, last_step
from lockstep.worker.profiling.record import ProfilerError, record

_RECORDINGS = 5
# The one before the last brings ranks and device to where steps in a row have them.
_STEPS_RECORDED = 2


class Effort(msgspec.Struct, frozen=True):
    """How often to measure: ``repetitions`` times ``steps`` steps."""

    steps: int = 20
    repetitions: int = 5

    @property
    def steps_taken(self) -> int:
        """Decode steps that a lane must live for."""
        timed = self.steps * (1 + self.repetitions)
        return 1 + timed + _RECORDINGS * _STEPS_RECORDED


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A decode step of ``num_reqs`` requests, run as ``num_tokens`` rows.

    ``context_len`` is what each request attends to in the end. ``step_us``
    and ``host_us`` are medians without the profiler: by the clock, and in launching the step.
    """

    run_mode: str
    num_reqs: int
    num_tokens: int
    context_len: int
    step_us: float
    host_us: float
    operations: list[Operation]


@dataclass(frozen=True, slots=True)
class DecodeProfiler:
    """Times the steps of ``steps``'s worker on ``device``, and records the operations of some."""

    steps: BareSteps
    device: torch.device
    effort: Effort

    def profile(self, num_reqs: int, prompt_len: int, max_mode: RunMode) -> StepRecord:
        """Start lanes with prompts of that length and let them decode in at most ``max_mode``.

        Of the recorded steps the shortest is kept, which nothing has made longer.

        Raises:
            ProfilerError: no whole steps were recorded.
        """
        steps, effort, decode = self.steps, self.effort, ReplicaPlan(num_reqs)
        steps.start_lanes(num_reqs, prompt_len)
        agreement = steps.run(decode, max_mode).agreement
        steps.time(decode, effort.steps, max_mode)
        times = [steps.time(decode, effort.steps, max_mode) for _ in range(effort.repetitions)]
        return StepRecord(
            run_mode=RunMode(agreement.run_mode).name,
            num_reqs=num_reqs,
            num_tokens=agreement.num_tokens_padded or num_reqs,
            context_len=prompt_len + effort.steps_taken,
            step_us=statistics.median(each.step_us for each in times),
            host_us=statistics.median(each.host_us for each in times),
            operations=self._record(decode, max_mode),
        )

    def _record(self, decode: ReplicaPlan, max_mode: RunMode) -> list[Operation]:
        work = partial(self.steps.time, decode, _STEPS_RECORDED, max_mode)
        recorded = [record(self.device, work) for _ in range(_RECORDINGS)]
        whole = [step for each in recorded if (step := last_step(each, _STEPS_RECORDED))]
        if not whole:
            raise ProfilerError("the operations of two equal steps differ in every recording")
        return min(whole, key=lambda step: step[-1].end_us)
