"""From the times that ranks noted to those of steps in which the whole batch decodes."""

from lockstep.comm.messages import DeviceTimes
from lockstep.launcher.bench_engine.device_steps import NotedSteps, differences


def steady_steps(
    times: DeviceTimes, num_before: int, *, short_len: int, long_len: int
) -> NotedSteps:
    """Of a call whose requests all got ``long_len`` tokens: from one begin to the next.

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
    return NotedSteps(differences(begins[:-1], nexts), differences(ends[:-1], nexts))
