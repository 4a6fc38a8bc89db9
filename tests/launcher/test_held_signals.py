"""Signals that come while Ray forks: none is lost, no lock stays held. No Ray is started."""

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import ray

from lockstep.launcher.cli import guarded
from lockstep.launcher.held_signals import SIGNALS, held_signals
from lockstep.launcher.ray_session import open_session


class InterruptedLock:
    """A lock like logging's; a signal comes just before it is freed."""

    def __init__(self, number: signal.Signals) -> None:
        self._lock = threading.RLock()
        self._number = number
        self.num_signals = 0

    def acquire(self) -> bool:
        return self._lock.acquire()

    def release(self) -> None:
        self.num_signals += 1
        signal.raise_signal(self._number)
        self._lock.release()

    def _at_fork_reinit(self) -> None:
        """Of the child, which is about to become another program."""

    def is_free(self) -> bool:
        with ThreadPoolExecutor(1) as other:
            return other.submit(self._lock.acquire, False).result(60)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # What a shell starts in the background is born with SIGINT ignored, and it stays so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def init_that_forks(**options: Any) -> SimpleNamespace:
    """What Ray does on its way up."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    subprocess.run(["true"], preexec_fn=lambda: None, check=True, timeout=60)
    return SimpleNamespace(address_info={"session_dir": "/nowhere"})


def start(*arguments: Any) -> NoReturn:
    open_session(num_ranks=1, device="cpu")
    raise AssertionError("the signal was lost")


# The warning is Python 3.12's, of any fork beside other threads.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("command", "number", "code", "last"),
    [
        (["generate", "hello", "--model"], signal.SIGTERM, 143, "terminated"),
        (["generate", "hello", "--model"], signal.SIGINT, 130, "interrupted"),
        (["serve", "--port", "0", "--model"], signal.SIGTERM, 0, "asked to stop while loading"),
        (["serve", "--port", "0", "--model"], signal.SIGINT, 0, "asked to stop while loading"),
    ],
)
def test_a_signal_while_ray_forks_ends_the_command_and_frees_logging(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    command: list[str],
    number: signal.Signals,
    code: int,
    last: str,
) -> None:
    lock = InterruptedLock(number)

    def init(**options: Any) -> SimpleNamespace:
        with monkeypatch.context() as only_here:
            only_here.setattr(logging, "_lock", lock)
            return init_that_forks(**options)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    assert guarded([*command, model, "--device", "cpu"], start) == code
    assert lock.num_signals == 1 and lock.is_free()
    assert capsys.readouterr().err.splitlines()[-1] == f"lockstep: {last}"


# The main thread is in C meanwhile and takes no signals itself: nothing interrupts it.
SECOND = """
import ctypes, os, signal, sys, threading, time
from lockstep.launcher.held_signals import SIGNALS, held_signals

def send():
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    time.sleep(0.6)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.3)
    print("goes on", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGUSR1, lambda number, frame: None)
for number in SIGNALS:
    signal.signal(number, lambda number, frame: sys.exit(1))
try:
    with held_signals():
        signal.pthread_sigmask(signal.SIG_BLOCK, [*SIGNALS, signal.SIGUSR1])
        threading.Thread(target=send, daemon=True).start()
        ctypes.CDLL(None).sleep(60)
finally:
    print("left", flush=True)
"""


def test_a_second_signal_ends_the_process_at_once_but_not_the_same_one_twice() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-P", "-c", SECOND], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (143, b"goes on\n"), done.stderr
    assert time.monotonic() - began < 50


def test_whoever_is_woken_by_signals_is_so_again_afterwards() -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        reader.settimeout(10)
        before = signal.set_wakeup_fd(writer.fileno())
        try:
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            with held_signals():
                signal.raise_signal(signal.SIGTERM)
            assert reader.recv(9) == bytes([signal.SIGTERM])
        finally:
            signal.set_wakeup_fd(before)


def test_what_was_ignored_or_left_to_the_system_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with held_signals():
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_signals_and_later_handlers_are_not_touched() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with held_signals():
        signal.signal(signal.SIGUSR1, before)
    assert signal.getsignal(signal.SIGUSR1) is before
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_another_thread_leaves_signals_alone() -> None:
    def held() -> list[Any]:
        with held_signals():
            return [signal.getsignal(number) for number in SIGNALS]

    before = [signal.getsignal(number) for number in SIGNALS]
    with ThreadPoolExecutor(1) as other:
        assert other.submit(held).result(60) == before
