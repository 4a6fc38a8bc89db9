"""Calls make no garbage; collections are short, and whole ones wait until nothing has run."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_model import write_byte_model
from fake_engine import FakeEngine
from served import Served, serving

from lockstep.launcher.serve import collector
from lockstep.launcher.serve.collector import IdleCollector

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def whole() -> Iterator[list[int]]:
    """Generations of the whole collections that have begun."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(2)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def make_garbage() -> None:
    """As much as several whole collections would be worth, all of it alive."""
    kept = [[] for _ in range(200_000)]
    del kept


@pytest.fixture
def walked() -> Iterator[list[int]]:
    """How many objects each collection but the whole ones had to look at."""
    counts: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] < 2:
            young = range(info["generation"] + 1)
            counts.append(sum(len(gc.get_objects(generation=each)) for each in young))

    gc.callbacks.append(note)
    yield counts
    gc.callbacks.remove(note)


def test_no_walk_takes_much_of_what_is_new(walked: list[int]) -> None:
    make_garbage()
    gathered, young = max(walked), gc.get_threshold()[0]
    with IdleCollector():
        walked.clear()
        make_garbage()
    assert len(walked) > 100
    assert max(walked) < 4 * young < gathered


def test_nothing_is_collected_while_calls_run(
    whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_QUIET_S", 0.05)
    thresholds = gc.get_threshold()
    make_garbage()
    assert whole, "Python collects by itself"
    with IdleCollector() as idle:
        whole.clear()
        make_garbage()
        for num_calls in (3, 0):
            idle.note(num_calls)
        assert not whole
        time.sleep(0.06)
        idle.note(0)
        assert len(whole) == 1
        idle.note(0)
        assert len(whole) == 1, "nothing has happened since"
    assert gc.get_threshold() == thresholds


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model: Path = tmp_path_factory.mktemp("model")
    with serving(write_byte_model(model), FakeEngine().start) as served:
        yield served


@pytest.mark.parametrize(
    "path, body",
    [
        (COMPLETIONS, {"prompt": "hello"}),
        (COMPLETIONS, {"prompt": "hello", "stream": True}),
        (COMPLETIONS, {"prompt": "hello", "temperature": -1}),
        (CHAT, {"messages": [{"role": "user", "content": "hello"}], "logprobs": True}),
    ],
)
def test_calls_leave_nothing_to_a_collector(path: str, body: Any, served: Served) -> None:
    served.ask(path, body)
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            served.ask(path, body)
        assert gc.collect() < 10
    finally:
        gc.enable()
