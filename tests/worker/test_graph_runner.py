"""The life of graphs on the host backend, alone and over two gloo ranks."""

import random
import re
import time
from contextlib import contextmanager

import pytest
import torch
from graph_faults import MISMATCHES, two
from graph_toys import ToyState, ToyStep, descriptor, manifest_of
from ranks import Rank, rank_outcomes, run_ranks

from lockstep.comm.collectives import Communicator
from lockstep.comm.errors import CommError, PeerLost, RankMismatch
from lockstep.comm.ledger import Ledger
from lockstep.parallel.topology import Topology
from lockstep.worker.graphs.errors import CaptureFailed, GraphError, StaleGraphError
from lockstep.worker.graphs.host import HostBackend
from lockstep.worker.graphs.runner import GraphRunner


def _captured(*sizes: int) -> tuple[GraphRunner, ToyStep]:
    step = ToyStep(ToyState(), Communicator.single())
    runner = GraphRunner(HostBackend(), Topology.single())
    runner.capture_all(manifest_of(*sizes), step.parts, step.state)
    return runner, step


def _replay(runner: GraphRunner, step: ToyStep, size: int, x: torch.Tensor) -> torch.Tensor:
    step.state.x[:size].copy_(x[:size])
    runner.replay(descriptor(size), "body")
    return step.state.y[:size].clone()


def test_replay_reacts_to_its_input_and_equals_eager_in_any_order() -> None:
    runner, step = _captured(8, 2, 1)
    inputs = {size: torch.randn(8, 16) for size in (8, 2, 1)}
    eager = ToyStep(ToyState(), Communicator.single())
    for size in (8, 1, 8, 2, 1, 2, 8):
        eager.state.x.copy_(inputs[size])
        eager.body(size)
        assert torch.equal(_replay(runner, step, size, inputs[size]), eager.state.y[:size])


def test_records_tell_costs_and_replays() -> None:
    told = []
    step = ToyStep(ToyState(), Communicator.single())
    runner = GraphRunner(HostBackend(), Topology.single())
    runner.capture_all(
        manifest_of(4, 1), step.parts, step.state, lambda done, of: told.append((done, of))
    )
    for _ in range(3):
        runner.replay(descriptor(4), "body")
    runner.replay(descriptor(4), "tail")
    record = runner.records[descriptor(4)]
    assert record.num_replays == {"body": 3, "tail": 1}
    assert runner.records[descriptor(1)].num_replays == {"body": 0, "tail": 0}
    assert record.seconds > 0 and record.num_bytes == 0
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert step.calls == {4: 2 + 3, 1: 2}, "one warm-up and one capture for each size"


def test_only_what_the_manifest_ordered_is_ever_captured() -> None:
    runner, step = _captured(4)
    calls = dict(step.calls)
    for key, part in ((descriptor(2), "body"), (descriptor(4), "tail of another kind")):
        assert not runner.captured(key, part)
        with pytest.raises(GraphError, match=f"{part} of size {key.num_tokens} was not captured"):
            runner.replay(key, part)
    assert runner.captured(descriptor(4), "tail") and step.calls == calls
    with pytest.raises(GraphError, match="captured once"):
        runner.capture_all(manifest_of(2), step.parts, step.state)
    runner.release()
    with pytest.raises(GraphError, match="was not captured"):
        runner.replay(descriptor(4), "body")
    runner.capture_all(manifest_of(2), step.parts, step.state)
    runner.replay(descriptor(2), "body")


@pytest.mark.parametrize("name", ["x", "y", "steps"])
def test_moved_tensor_is_named_without_its_address(name: str) -> None:
    runner, step = _captured(4)
    moved = getattr(step.state, name).clone()
    setattr(step.state, name, moved)
    with pytest.raises(StaleGraphError, match=f"static tensor '{name}' has moved") as caught:
        runner.replay(descriptor(4), "body")
    assert str(moved.data_ptr()) not in str(caught.value)
    assert not re.search(r"0x|\d{5}", str(caught.value))


def test_new_generation_or_a_lost_tensor_makes_graphs_stale() -> None:
    runner, step = _captured(4)
    step.state.generation += 1
    with pytest.raises(StaleGraphError, match="generation 0 .* now 1"):
        runner.replay(descriptor(4), "tail")
    step.state.generation = 0
    del step.state.steps
    with pytest.raises(StaleGraphError, match=r"\['steps'\] came or went"):
        runner.replay(descriptor(4), "body")


def test_error_while_capturing_names_the_size_and_leaves_no_graph() -> None:
    step = ToyStep(ToyState(), Communicator.single())
    runner = GraphRunner(HostBackend(), Topology.single())

    def parts(key):
        return step.parts(key) if key.num_tokens > 2 else {"body": lambda: step.state.x.item()}

    with pytest.raises(CaptureFailed, match="at size 2: RuntimeError: a Tensor with") as caught:
        runner.capture_all(manifest_of(4, 2), parts, step.state)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not runner.captured(descriptor(4), "body")


class _LoggingSession:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def warm_up(self, fn) -> None:
        self._log.append("warm up")

    def idle(self) -> None:
        self._log.append("idle")

    def capture(self, fn):
        self._log.append("capture")

    def used_bytes(self) -> int:
        return 0


class _LoggingBackend:
    name = "log"

    def __init__(self, log: list[str]) -> None:
        self._log = log

    @contextmanager
    def session(self):
        yield _LoggingSession(self._log)


class _LoggingTopology:
    """The part of a Topology that the runner uses."""

    def __init__(self, log: list[str]) -> None:
        self.ledger = Ledger()
        self.lockstep = Communicator.single()
        self.lockstep.barrier = lambda timeout_s: log.append("barrier")
        self.retire = lambda: log.append("retire")


def test_eager_work_is_done_and_forgotten_everywhere_before_any_capture() -> None:
    log: list[str] = []
    step = ToyStep(ToyState(), Communicator.single())
    GraphRunner(_LoggingBackend(log), _LoggingTopology(log)).capture_all(
        manifest_of(2, 1), step.parts, step.state
    )
    captures = ["barrier", "capture", "capture"] * 2
    assert log == ["warm up"] * 4 + ["idle", "retire"] + captures


def _late_but_alike(rank: Rank) -> list[list[float]]:
    runner, step = two(rank, "cpu")
    source = random.Random(rank.rank)

    def parts(key):
        time.sleep(source.uniform(0, 0.3))
        return step.parts(key)

    runner.capture_all(manifest_of(8, 4, 2, 1, tp="gloo"), parts, step.state)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    assert runner.records[descriptor(8)].num_operations == 1
    return [_replay(runner, step, size, x)[0].tolist() for size in (4, 8, 4)]


def test_ranks_that_come_late_replay_the_same() -> None:
    first, second = run_ranks(_late_but_alike, 2, gloo=False)
    assert first == second and first[0] == first[2]


@pytest.mark.parametrize(
    "fn, message", MISMATCHES, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_rank_learns_which_rank_differs_and_where(fn, message: str) -> None:
    started = time.monotonic()
    outcomes = rank_outcomes(fn, 2, "cpu", gloo=False)
    assert time.monotonic() - started < 30
    for outcome in outcomes:
        assert isinstance(outcome.error, RankMismatch), outcome
        assert re.search(message, str(outcome.error)), outcome.error


def _raises_at_size_2(rank: Rank) -> None:
    runner, step = two(rank, "cpu")

    def parts(key):
        def body():
            if rank.rank == 1 and key.num_tokens == 2:
                raise ValueError("no such kernel")
            step.body(key.num_tokens)

        return {"body": body}

    try:
        runner.capture_all(manifest_of(4, 2, 1), parts, step.state)
    finally:
        # What a capture was broken off with is not used again: its ranks are out of step.
        with pytest.raises(CommError, match="rank 1|this rank gave up"):
            step.comm.all_reduce(step.state.x)
        assert not runner.records


def test_error_on_one_rank_is_told_and_not_hidden_by_a_hang() -> None:
    started = time.monotonic()
    waiting, failing = rank_outcomes(_raises_at_size_2, 2, gloo=False)
    assert time.monotonic() - started < 30
    assert isinstance(failing.error, CaptureFailed)
    assert str(failing.error) == "at size 2: ValueError: no such kernel"
    assert 'raise ValueError("no such kernel")' in failing.traceback
    assert isinstance(waiting.error, PeerLost) and waiting.error.global_rank == 1
    assert "gave up (ValueError: no such kernel)" in str(waiting.error)
