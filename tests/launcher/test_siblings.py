"""Ranks of a start without Ray go together, but nobody waits for the dead."""

import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from lockstep.launcher import siblings
from lockstep.launcher.processes import boot_id
from lockstep.launcher.roll import Presence
from lockstep.launcher.siblings import Siblings


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def siblings_of(other: subprocess.Popen[bytes]) -> Siblings:
    """Rank 0 beside ``other`` as rank 1; both about to end."""
    roll = [Presence(pid, boot_id(), 0, "127.0.0.1") for pid in (1, other.pid)]
    made = Siblings(roll, rank=0)
    made.leave()
    return made


def seconds_waited(made: Siblings, store: HashStore, timeout_s: float) -> float:
    start = time.monotonic()
    made.wait_left(store, timeout_s)
    return time.monotonic() - start


def test_a_dead_rank_is_not_waited_for(other: subprocess.Popen[bytes]) -> None:
    made = siblings_of(other)
    other.kill()
    assert seconds_waited(made, HashStore(), 60) < 50


def test_a_rank_that_stays_stopped_is_killed(
    other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(siblings, "STOPPED_S", 0.4)
    other.send_signal(signal.SIGSTOP)
    siblings_of(other)
    assert other.wait(60) == -signal.SIGKILL


def test_a_living_rank_is_waited_for_until_it_has_left(other: subprocess.Popen[bytes]) -> None:
    made, store = siblings_of(other), HashStore()
    assert seconds_waited(made, store, 0.2) >= 0.2
    store.set("lockstep/left/1", "")
    assert seconds_waited(made, store, 60) < 50
