"""SIGTERM and SIGINT: the first lets running requests finish, the second does not."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.launcher.held_signals import SAME_SIGNAL_S, SIGNALS
from lockstep.launcher.serve.engine_loop import Inbox
from lockstep.launcher.serve.life import Life, State


class Stopping:
    """Whether the server is to stop, and by when. While it loads, it stops by KeyboardInterrupt.

    Args:
        inbox: of the engine's thread, which is woken.
        timeout_s: what running requests get to finish.

    ``signal_name``: of the first signal. ``hurried``: a second one has come.
    """

    def __init__(self, life: Life, inbox: Inbox, timeout_s: float) -> None:
        self._life = life
        self._inbox = inbox
        self.timeout_s = timeout_s
        self.signal_name = ""
        self.hurried = False
        self._asked_at: float | None = None
        self._deadline = math.inf

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    @property
    def overdue(self) -> bool:
        return time.monotonic() >= self._deadline

    @property
    def waited_s(self) -> float:
        """Seconds since the first signal, which has come."""
        assert self._asked_at is not None
        return time.monotonic() - self._asked_at

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Meanwhile signals are handled here. Main thread only."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now, state = time.monotonic(), self._life.state
        if state is State.DEAD:
            return
        if self._asked_at is None:
            self.signal_name = signal.Signals(number).name
            self._asked_at, self._deadline = now, now + self.timeout_s
            self._life.drain()
        elif now - self._asked_at > SAME_SIGNAL_S:
            self._deadline, self.hurried = now, True
        self._inbox.put(None)
        if state is State.LOADING:
            # Leaves the start by way of its finally blocks; Ray would swallow a SystemExit.
            raise KeyboardInterrupt
