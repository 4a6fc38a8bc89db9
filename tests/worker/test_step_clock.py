"""The times that steps note of themselves, and that steps are no others for it."""

import pytest
import torch
from inline import SPEC, alone_topology, request, serve, worker_config
from msgspec import structs
from rig import Rig, any_batch, chunk, eager, full, join, make_rig
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.comm.messages import DeviceTimes, ReplicaPlan
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker

START = ReplicaPlan(
    2, joins=[join(0, [1, 2]), join(1, [3, 4])], chunks=[chunk(0, [5]), chunk(1, [6])]
)
DECODE = ReplicaPlan(2)


def times_of(rig: Rig) -> DeviceTimes:
    assert rig.state.clock is not None
    return rig.state.clock.read()


def in_order(times: DeviceTimes) -> list[int]:
    return [ns for pair in zip(times.begin_ns, times.end_ns, strict=True) for ns in pair]


@pytest.fixture
def rig() -> Rig:
    made = make_rig(num_timestamps=4)
    made.capture(2, split=[2])
    return made


def test_every_kind_of_step_notes_its_times_and_the_last_are_kept(rig: Rig) -> None:
    assert times_of(rig) == DeviceTimes(0, [], [])
    rig.run(eager(0, START))
    rig.run(full(1, DECODE, 2))
    first = times_of(rig)
    assert first.num_steps == 2 and len(in_order(first)) == 4
    rig.run(any_batch(RunMode.PIECEWISE, 2, DECODE, 2))
    rig.run(full(3, DECODE, 2))
    rig.run(eager(4, DECODE))
    last = times_of(rig)
    assert last.num_steps == 5 and len(in_order(last)) == 8
    assert in_order(last)[:2] == in_order(first)[2:]
    assert in_order(last) == sorted(set(in_order(last)))


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip it, torch would first import all of it."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operations_of_a_step(rig: Rig) -> list[str]:
    rig.run(eager(0, START))
    with Operations() as seen:
        rig.run(full(1, DECODE, 2))
    return seen.names


def test_the_operations_of_a_step_are_the_same_with_and_without(rig: Rig) -> None:
    plain = make_rig()
    plain.capture(2)
    names = operations_of_a_step(plain)
    assert "aten.mm.default" in names
    assert names == operations_of_a_step(rig)
    assert plain.state.clock is None
    assert set(rig.state.statics()) - set(plain.state.statics()) == {"step_times", "step_counter"}


def test_a_worker_tells_its_times_and_one_without_says_so() -> None:
    config = structs.replace(worker_config(), step_timestamps=64)
    told: list[DeviceTimes] = []
    close = Worker.close

    def ask_first(worker: Worker) -> None:
        told.append(worker.device_times())
        close(worker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "close", ask_first)
        serve(config, [request("a", [1, 2, 3], max_tokens=8)])
    assert told[0].num_steps == 8
    with pytest.raises(RuntimeError, match="step_timestamps is 0"):
        Worker(worker_config(), SPEC, alone_topology()).device_times()


def test_times_move_with_lanes_that_are_set_aside(rig: Rig) -> None:
    """A capture between two steps must not count as steps."""
    rig.run(eager(0, START))
    before, kept = times_of(rig), rig.state.keep()
    rig.state.clear()
    assert times_of(rig).num_steps == 0
    rig.state.put_back(kept)
    assert times_of(rig) == before
    assert torch.equal(kept["step_counter"], torch.ones(1, dtype=torch.int64))
