"""What the CUDA backend asks of torch, in which order, without a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lockstep.worker.graphs.cuda import CudaBackend
from lockstep.worker.graphs.errors import GraphError

DEVICE = torch.device("cuda:0")


class FakeGraph:
    """Ends an invalid capture as torch does: with an error of its own."""

    def __init__(self, log: list[object]) -> None:
        self._log = log

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        self._log.append(("begin", pool, capture_error_mode))

    def capture_end(self) -> None:
        self._log.append("end")
        if "broken" in self._log:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self._log.append("replay")

    def reset(self) -> None:
        self._log.append("reset")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []
    pools = iter(["first pool", "second pool"])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "capture stream")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(calls))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    run_on(monkeypatch, 1)
    return calls


def run_on(monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    current = SimpleNamespace(cuda_stream=stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)


def test_all_captures_are_thread_local_and_share_one_pool(log: list[object]) -> None:
    backend = CudaBackend(DEVICE)
    with backend.session() as session:
        for name in ("body", "tail"):
            session.capture(lambda name=name: log.append(name))
    begin = ("begin", "first pool", "thread_local")
    assert log == [begin, "body", "end", begin, "tail", "end"]


def test_what_breaks_a_capture_is_told_and_not_what_ending_it_raises(log: list[object]) -> None:
    backend = CudaBackend(DEVICE)

    def broken() -> None:
        log.append("broken")
        raise KeyError("layer 3")

    with pytest.raises(KeyError, match="layer 3"):
        backend.capture(broken)
    assert log[1:] == ["broken", "end"], "the stream does not capture any more"
    backend.release()
    assert "reset" not in log, "a broken graph is not one of the set"


def test_a_replay_beside_another_is_refused(log, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one stream replays follow each other, so no communicator ever has two in flight."""
    backend = CudaBackend(DEVICE)
    body, tail = (backend.capture(lambda: None) for _ in range(2))
    body.replay()
    run_on(monkeypatch, 2)
    with pytest.raises(GraphError, match="graphs replay on one stream, and this is another one"):
        tail.replay()
    run_on(monkeypatch, 1)
    tail.replay()
    assert log.count("replay") == 2


def test_graphs_go_as_a_set_once_the_device_is_done(log: list[object]) -> None:
    backend = CudaBackend(DEVICE)
    for _ in range(3):
        backend.capture(lambda: None)
    log.clear()
    backend.release()
    assert log == ["synchronize", "reset", "reset", "reset"]
    backend.capture(lambda: None)
    assert log[4] == ("begin", "second pool", "thread_local")
