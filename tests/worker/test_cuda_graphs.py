"""CUDA graphs of a toy step on one GPU, and the same over ranks."""

import gc
import re
import threading

import pytest
import torch
from graph_faults import MISMATCHES
from graph_toys import WIDTH, ToyState, ToyStep, descriptor, manifest_of
from ranks import Rank, join, num_gpus, rank_outcomes, run_ranks

from lockstep.comm.collectives import Communicator
from lockstep.comm.errors import PeerLost, RankMismatch
from lockstep.parallel.topology import Topology
from lockstep.worker.graphs.cuda import CudaBackend
from lockstep.worker.graphs.errors import CaptureFailed, GraphError, StaleGraphError
from lockstep.worker.graphs.runner import GraphRunner

_SIZES = (8, 4, 2, 1)
gpu = pytest.mark.gpu
multigpu = pytest.mark.multigpu


@pytest.fixture
def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda:0")


def _captured(
    device: torch.device, *sizes: int, backend: CudaBackend | None = None
) -> tuple[GraphRunner, ToyStep]:
    step = ToyStep(ToyState(device=device), Communicator.single())
    runner = GraphRunner(backend or CudaBackend(device), Topology.single(str(device)))
    runner.capture_all(manifest_of(*sizes), step.parts, step.state)
    return runner, step


def _eager(size: int, x: torch.Tensor) -> torch.Tensor:
    step = ToyStep(ToyState(device=x.device), Communicator.single())
    step.state.x.copy_(x)
    step.body(size)
    return step.state.y[:size].clone()


def _replayed(runner: GraphRunner, step: ToyStep, size: int, x: torch.Tensor) -> torch.Tensor:
    step.state.x.copy_(x)
    runner.replay(descriptor(size), "body")
    return step.state.y[:size].clone()


@gpu
def test_graph_equals_eager_bit_for_bit_in_the_order_x_y_x(device: torch.device) -> None:
    runner, step = _captured(device, *_SIZES)
    x, y = torch.randn(2, 8, WIDTH, device=device)
    for size in (8, 1, 4, 2, 8, 1):
        for values in (x, y, x):
            found = _replayed(runner, step, size, values)
            assert torch.equal(found, _eager(size, values))
    assert step.calls == {size: 2 for size in _SIZES}, "replays run no Python"


@gpu
def test_parts_are_replayed_back_to_back_and_advance_the_state(device: torch.device) -> None:
    runner, step = _captured(device, *_SIZES)
    step.state.steps.zero_()
    for size in (8, 4, 1, 4):
        runner.replay(descriptor(size), "body")
        runner.replay(descriptor(size), "tail")
    assert step.state.steps.tolist() == [4, 3, 3, 3, 1, 1, 1, 1]
    assert runner.records[descriptor(4)].num_replays == {"body": 2, "tail": 2}


@gpu
def test_moved_tensor_is_refused(device: torch.device) -> None:
    runner, step = _captured(device, 4)
    step.state.y = step.state.y.clone()
    with pytest.raises(StaleGraphError, match="static tensor 'y' has moved"):
        runner.replay(descriptor(4), "body")


@gpu
def test_a_tensor_kept_from_the_pool_is_named(device: torch.device) -> None:
    kept: list[torch.Tensor] = []
    step = ToyStep(ToyState(device=device), Communicator.single())

    def parts(key):
        return {"body": lambda: kept.append(step.state.x + 1)}

    runner = GraphRunner(CudaBackend(device), Topology.single(str(device)))
    with pytest.raises(CaptureFailed, match=rf"OutsidePool: .* kept: {__file__}:\d+: return"):
        runner.capture_all(manifest_of(4), parts, step.state)
    kept.clear()
    runner.release()


def _host_sync_at_size_2(rank: Rank) -> None:
    device = torch.device("cuda:0")
    step = ToyStep(ToyState(device=device), Communicator.single())

    def parts(key):
        if key.num_tokens != 2:
            return step.parts(key)
        return {"body": lambda: step.state.y[step.state.x > 0].sum()}

    runner = GraphRunner(CudaBackend(device), Topology.single(str(device)))
    runner.capture_all(manifest_of(4, 2, 1), parts, step.state)


@gpu
def test_host_sync_while_capturing_is_an_error_with_size_and_source_line() -> None:
    # In a process of its own: a broken capture leaves one that is only good to end.
    (outcome,) = rank_outcomes(_host_sync_at_size_2, 1, gloo=False, timeout_s=100)
    assert isinstance(outcome.error, CaptureFailed)
    assert "at size 2: HostSync: aten::index waits for the device: " in str(outcome.error)
    assert "step.state.y[step.state.x > 0]" in str(outcome.error)


@gpu
def test_another_thread_may_poll_events_while_this_one_captures(device: torch.device) -> None:
    event, stop = torch.cuda.Event(), threading.Event()
    event.record()

    def poll() -> None:
        while not stop.is_set():
            event.query()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for _ in range(20):
            _captured(device, *_SIZES)[0].release()
    finally:
        stop.set()
        thread.join()


@gpu
def test_second_stream_is_refused(device: torch.device) -> None:
    runner, _ = _captured(device, 2)
    runner.replay(descriptor(2), "body")
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(GraphError, match="one stream"):
        runner.replay(descriptor(2), "body")
    runner.replay(descriptor(2), "body")


@gpu
def test_capturing_again_and_again_keeps_no_memory(device: torch.device) -> None:
    def used() -> int:
        gc.unfreeze()
        gc.collect()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    # One backend: libraries keep a workspace for each stream, and each backend has its own.
    backend = CudaBackend(device)
    _captured(device, *_SIZES, backend=backend)[0].release()
    before = used()
    for _ in range(10):
        _captured(device, *_SIZES, backend=backend)[0].release()
    assert used() - before < 32 << 20


@gpu
def test_what_a_step_makes_once_lies_outside_the_pool(device: torch.device) -> None:
    """Made while capturing it would lie where an earlier graph has its intermediates."""
    made: dict[str, torch.Tensor] = {}
    step = ToyStep(ToyState(device=device), Communicator.single())

    def parts(key):
        def body() -> None:
            torch.empty(1 << 16, device=device).fill_(1.0)
            if key.num_tokens == 2 and not made:
                made["once"] = torch.full((1 << 16,), 7.0, device=device)
            step.body(key.num_tokens)

        return {"body": body}

    runner = GraphRunner(CudaBackend(device), Topology.single(str(device)))
    runner.capture_all(manifest_of(*_SIZES), parts, step.state)
    for size in _SIZES * 5:
        runner.replay(descriptor(size), "body")
    assert made["once"].eq(7.0).all()


@gpu
def test_capture_leaves_the_allocator_s_cache_alone(device: torch.device) -> None:
    big = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    del big
    before = torch.cuda.memory_reserved(device)
    assert before >= 256 << 20
    runner, _ = _captured(device, *_SIZES)
    assert torch.cuda.memory_reserved(device) >= before
    runner.release()


@gpu
def test_after_capture_the_collector_has_nothing_old_to_walk(device: torch.device) -> None:
    _captured(device, 1)
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()


def _rounds(rank: Rank, choice: str) -> list[int]:
    """Rounds whose replay differs from eager: 100 eager all-reduces, capture at once, replay."""
    topology = join(rank, device="cuda", all_reduce=choice, timeout_s=60.0)
    step = ToyStep(ToyState(device=f"cuda:{rank.rank}"), topology.tp)
    eager = torch.ones(65536, dtype=torch.bfloat16, device="cuda")
    wrong = []
    for number in range(50):
        runner = GraphRunner(CudaBackend(step.state.x.device), topology)

        def parts(key):
            def body() -> None:
                step.body(key.num_tokens)

            for _ in range(100):
                topology.tp.all_reduce(eager.clone())
            return {"body": body}

        runner.capture_all(manifest_of(4), parts, step.state)
        step.state.x.copy_(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)))
        runner.replay(descriptor(4), "body")
        replayed = step.state.y.clone()
        step.body(4)
        if not torch.equal(replayed, step.state.y):
            wrong.append(number)
        runner.release()
    return wrong


@multigpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("choice", ["nccl", "auto"])
def test_capture_right_after_eager_all_reduces_works_fifty_times(choice: str) -> None:
    found = run_ranks(_rounds, num_gpus(), choice, gloo=False, timeout_s=280)
    assert found == [[]] * num_gpus()


@multigpu
@pytest.mark.parametrize(
    "fn, message", MISMATCHES, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_rank_learns_which_rank_differs_and_where_on_gpus(fn, message: str) -> None:
    outcomes = rank_outcomes(fn, 2, "cuda", gloo=False, timeout_s=100)
    for outcome in outcomes:
        assert isinstance(outcome.error, RankMismatch), outcome
        assert re.search(message, str(outcome.error)), outcome.error


def _fails_on_one(rank: Rank) -> None:
    topology = join(rank, device="cuda", timeout_s=60.0)
    step = ToyStep(ToyState(device=f"cuda:{rank.rank}"), topology.tp)

    def parts(key):
        def body() -> None:
            step.body(key.num_tokens)
            if rank.rank == 1 and torch.cuda.is_current_stream_capturing():
                raise ValueError("only while recording")

        return {"body": body}

    GraphRunner(CudaBackend(step.state.x.device), topology).capture_all(
        manifest_of(4), parts, step.state
    )


@multigpu
def test_error_while_one_rank_captures_is_the_one_that_is_told() -> None:
    waiting, failing = rank_outcomes(_fails_on_one, 2, gloo=False, timeout_s=100)
    assert isinstance(failing.error, CaptureFailed)
    assert "at size 4: ValueError: only while recording" in str(failing.error)
    assert isinstance(waiting.error, PeerLost) and waiting.error.global_rank == 1
