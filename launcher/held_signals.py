"""SIGTERM and SIGINT while code of others starts processes: kept, and told once that is over.

Around a fork Python runs callbacks that take and free locks, logging's among them. What a handler
raises in one of them is dropped: the signal would be lost, and the lock never be free again.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A signal to a whole group of processes may reach this one by several ways at once.
SAME_SIGNAL_S = 0.5


@contextmanager
def held_signals() -> Iterator[None]:
    """The first signal reaches the handler that was there on the way out, whatever else happens.

    A second one, half a second later or more, ends the process at once: 128 plus its number is the
    exit code, and no ``finally`` block runs. A signal that is ignored stays so, and one that ends
    the process by the system's default still does. Nobody sets another handler meanwhile. In a
    thread other than the main one, where Python runs no handlers, signals are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = _Held()
    with ExitStack() as stack:
        # Entered first and so left last: every handler is back when this one raises.
        stack.callback(held.tell)
        for number in SIGNALS:
            before = signal.getsignal(number)
            if callable(before):
                stack.callback(signal.signal, number, before)
                signal.signal(number, held)
        stack.enter_context(_handlers_kept())
        stack.enter_context(_second_one_ends())
        yield


class _Held:
    """Handler of signals that takes note of the first."""

    def __init__(self) -> None:
        self._first: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = number

    def tell(self) -> None:
        if self._first is not None:
            signal.raise_signal(self._first)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Whoever sets a handler of our signals meanwhile does so in vain."""
    set_handler: Callable[..., Any] = signal.signal

    def keep(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in SIGNALS else set_handler(number, handler)

    signal.signal = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler


@contextmanager
def _second_one_ends() -> Iterator[None]:
    """A thread sees to it: the main one may be in C for long, where Python runs no handler."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = threading.Thread(target=_watch, args=(reader,), name="second signal", daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writer)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        watcher.join()
        os.close(reader)


def _watch(reader: int) -> None:
    """Until the pipe ends, in which each signal is a byte as soon as it comes."""
    first = math.inf
    while number := int.from_bytes(os.read(reader, 1)):
        if number not in SIGNALS:
            continue
        now = time.monotonic()
        if now - first > SAME_SIGNAL_S:
            # No default action instead: the first process of a container would outlive it.
            os._exit(128 + number)
        first = min(first, now)
