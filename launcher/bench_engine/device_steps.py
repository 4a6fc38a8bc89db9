"""When steps ran, as ranks noted it, and what is left of that in the table."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from lockstep.comm.messages import DeviceTimes
from lockstep.launcher.bench_engine.numbers import DeviceNumbers, quantiles
from lockstep.launcher.engine import TimedEngine
from lockstep.launcher.front_end import FrontEnd


@dataclass(frozen=True, slots=True)
class NotedSteps:
    """Nanoseconds of steps with a wait between two each, and of these waits alone."""

    step_ns: list[int]
    host_ns: list[int]


# From all that a rank has noted, and how many steps it had taken before: those that are measured.
PickSteps = Callable[[DeviceTimes, int], NotedSteps]


@contextmanager
def noted(front: FrontEnd, pick: PickSteps, steps: list[NotedSteps]) -> Iterator[None]:
    """Add what the first rank of every replica notes of the steps meanwhile.

    The others may still be at the last step when its tokens are out.
    """
    worker = front.resolved.worker
    if not worker.step_timestamps:
        yield
        return
    engine = cast(TimedEngine, front.engine)
    before = engine.device_times()[:: worker.parallel.tp_size]
    yield
    after = engine.device_times()[:: worker.parallel.tp_size]
    steps += [pick(times, earlier.num_steps) for earlier, times in zip(before, after, strict=True)]


def device_numbers(steps: Iterable[NotedSteps]) -> DeviceNumbers | None:
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


def differences(earlier: Sequence[int], later: Sequence[int]) -> list[int]:
    """Of two as long ones, place by place."""
    return [after - before for before, after in zip(earlier, later, strict=True)]
