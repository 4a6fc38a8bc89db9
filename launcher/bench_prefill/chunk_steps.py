"""From the times that ranks noted to those of a prompt's later chunks."""

from lockstep.comm.messages import DeviceTimes
from lockstep.launcher.bench_engine.device_steps import NotedSteps, differences


def chunk_steps(times: DeviceTimes, num_before: int, *, first: int, num_chunks: int) -> NotedSteps:
    """Of a prompt whose every step is a chunk: from one end to the next, from the ``first`` on.

    Nothing is taken of a call with other steps in between, as replicas in lockstep may have.

    Args:
        times: asked after the call, of a rank that publishes: its last step is then noted.
        num_before: steps before the call.
        first: chunks that are left out, at least one.
    """
    if times.num_steps - num_before != num_chunks:
        return NotedSteps([], [])
    num_lost = times.num_steps - len(times.begin_ns)
    places = range(max(num_before + first - num_lost, 1), len(times.begin_ns))
    begins = [times.begin_ns[place] for place in places]
    ends = [times.end_ns[place] for place in places]
    ends_before = [times.end_ns[place - 1] for place in places]
    return NotedSteps(differences(ends_before, ends), differences(ends_before, begins))
