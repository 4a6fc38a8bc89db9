"""From the times that ranks noted to those of steps in which the whole batch decodes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.comm.messages import DeviceTimes
from lockstep.launcher.bench_decode.numbers import DeviceNumbers, quantiles


@dataclass(frozen=True, slots=True)
class SteadySteps:
    """Nanoseconds from each step's begin to the next one's, and from its end to that begin."""

    step_ns: list[int]
    host_ns: list[int]


def steady_steps(
    times: DeviceTimes, *, num_before: int, short_len: int, long_len: int
) -> SteadySteps:
    """Of a call whose requests all got ``long_len`` tokens.

    The request whose prompt came last has its first token from the last step with a prompt, and
    then one from every step to the end. The one that came first is done after ``long_len`` steps.
    Between the two, all decode. Steps before ``short_len`` are left out, as by the clock.

    Args:
        times: asked after the call, of a rank that publishes: its last step is then noted.
        num_before: steps before the call.
    """
    num_steps = times.num_steps - num_before
    num_with_prompts = num_steps - long_len + 1
    num_lost = times.num_steps - len(times.begin_ns) - num_before
    first = max(num_with_prompts, short_len, num_lost)
    places = range(first - num_lost, max(first, long_len) - num_lost)
    begins = [times.begin_ns[place] for place in places]
    ends = [times.end_ns[place] for place in places]
    nexts = begins[1:]
    return SteadySteps(_differences(begins[:-1], nexts), _differences(ends[:-1], nexts))


def device_numbers(steps: Iterable[SteadySteps]) -> DeviceNumbers | None:
    """Over all ranks and repetitions; None if there is no such step."""
    every = list(steps)
    step_ns = [ns for each in every for ns in each.step_ns]
    host_ns = [ns for each in every for ns in each.host_ns]
    if not step_ns:
        return None
    return DeviceNumbers(
        num_steps=len(step_ns),
        clock_ns=math.gcd(*step_ns, *host_ns),
        step_ms=quantiles([ns / 1e6 for ns in step_ns]),
        host_us=quantiles([ns / 1e3 for ns in host_ns]),
    )


def _differences(earlier: Sequence[int], later: Sequence[int]) -> list[int]:
    return [after - before for before, after in zip(earlier, later, strict=True)]
