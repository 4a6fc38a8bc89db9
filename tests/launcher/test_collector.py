"""Whole garbage collections wait until nothing has run for a while."""

import gc
import time
from collections.abc import Iterator

import pytest

from lockstep.launcher.serve import collector
from lockstep.launcher.serve.collector import IdleCollector


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
