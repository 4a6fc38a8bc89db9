"""SIGTERM and SIGINT: the first lets running requests finish, the second does not."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.launcher.serve.engine_loop import Inbox
from lockstep.launcher.serve.life import Life, State

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """Whether the server is to stop, and by when.

    Args:
        inbox: of the engine's thread, which is woken.
        timeout_s: what running requests get to finish.
    """

    def __init__(self, life: Life, inbox: Inbox, timeout_s: float) -> None:
        self._life = life
        self._inbox = inbox
        self._timeout_s = timeout_s
        self._deadline: float | None = None

    @property
    def asked(self) -> bool:
        return self._deadline is not None

    @property
    def overdue(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

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
        if self._life.state is State.DEAD:
            return
        loading, again = self._life.state is State.LOADING, self.asked
        now = time.monotonic()
        self._deadline = now if loading or again else now + self._timeout_s
        self._life.drain()
        self._inbox.put(None)
        if loading:
            # Leaves the start by way of its finally blocks.
            raise SystemExit(0)
