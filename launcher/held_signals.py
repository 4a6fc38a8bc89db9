"""SIGTERM and SIGINT while code of others starts processes: kept, and told once that is over.

Around a fork Python runs callbacks that take and free locks, logging's among them. What a handler
raises in one of them is dropped: the signal would be lost, and the lock never be free again.
"""

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
        yield


class _Held:
    """Handler of signals that takes note of the first."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._came_at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._came_at = number, now
        elif now - self._came_at > SAME_SIGNAL_S:
            # No default action instead: the first process of a container would outlive it.
            os._exit(128 + number)

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
