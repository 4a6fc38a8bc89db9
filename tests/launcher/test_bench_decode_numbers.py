"""From raw times to the numbers of the table."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.messages import DeviceTimes
from lockstep.launcher.bench_decode.steady_steps import steady_steps
from lockstep.launcher.bench_engine.device_steps import NotedSteps, device_numbers
from lockstep.launcher.bench_engine.numbers import ms_of_each, quantiles, spread

values = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=40)


@given(values)
def test_a_spread_is_of_its_values(given_values: list[float]) -> None:
    found = spread(given_values)
    assert found.median == pytest.approx(statistics.median(given_values))
    assert (found.least, found.most) == (min(given_values), max(given_values))


@given(values)
def test_quantiles_leave_as_many_values_above_as_they_say(given_values: list[float]) -> None:
    found = quantiles(given_values)
    assert found == quantiles(sorted(given_values, reverse=True))
    assert min(given_values) <= found.p50 <= found.p99 <= max(given_values) * (1 + 1e-12)
    assert sum(value > found.p50 for value in given_values) <= len(given_values) / 2
    assert sum(value > found.p99 for value in given_values) <= 1


@given(st.floats(0, 10), st.floats(0.0001, 0.1), st.integers(1, 99), st.integers(1, 400))
def test_prompts_and_overheads_fall_out(other_s: float, step_s: float, short: int, more: int):
    short_s, long_s = other_s + short * step_s, other_s + (short + more) * step_s
    assert ms_of_each(short_s, long_s, more) == pytest.approx(step_s * 1e3, rel=1e-6)


@given(
    late=st.lists(st.integers(0, 9), min_size=1, max_size=5).map(lambda each: [0, *each]),
    short_len=st.integers(1, 8),
    more=st.integers(1, 12),
    num_before=st.integers(0, 5),
    num_lost=st.integers(0, 30),
    busy=st.integers(1, 9),
)
def test_steady_steps_are_those_in_which_all_decode(
    late: list[int], short_len: int, more: int, num_before: int, num_lost: int, busy: int
) -> None:
    """Request i has its first token from step ``late[i]`` of the call, and one of each after it."""
    long_len = short_len + more
    num_steps = max(late) + long_len
    begins = [10 * step for step in range(num_before + num_steps)]
    ends = [begin + busy for begin in begins]
    times = DeviceTimes(len(begins), begins[num_lost:], ends[num_lost:])
    decoding = [
        step
        for step in range(num_steps)
        if all(first < step < first + long_len for first in late) and step >= short_len
    ]
    kept = [step for step in decoding if num_before + step >= num_lost]
    found = steady_steps(times, num_before, short_len=short_len, long_len=long_len)
    pairs = max(0, len(kept) - 1)
    assert found == NotedSteps([10] * pairs, [10 - busy] * pairs)


def test_all_ranks_and_repetitions_count() -> None:
    found = device_numbers([NotedSteps([1_000_000], [2000]), NotedSteps([3_000_000] * 2, [0] * 2)])
    assert found is not None and (found.num_steps, found.clock_ns) == (3, 2000)
    assert (found.step_ms.p50, found.host_us.p50) == (3.0, 0.0)
    assert found.host_us.p99 == pytest.approx(1.96)
    assert device_numbers([NotedSteps([], [])]) is None
