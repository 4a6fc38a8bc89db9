"""The one thread that talks to the engine: requests in, deltas out, its failure as an exception."""

import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NoReturn

from lockstep.comm.messages import AddRequest, FrontEndMessage, TokenDelta
from lockstep.launcher.engine import EngineClient
from lockstep.launcher.errors import EngineDead
from lockstep.launcher.serve.life import Life

Inbox = SimpleQueue[FrontEndMessage | None]

# While requests run, one that comes waits at most this long; a step's deltas end the wait.
_POLL_S = 0.005
_IDLE_S = 0.2
_CAUSE_S = 10.0


class EngineLoop:
    """Feeds an engine from ``inbox``, whose None only wakes it.

    Args:
        life: hears at once when the engine fails.
        deliver: is given deltas, in this thread.
    """

    def __init__(
        self,
        engine: EngineClient,
        inbox: Inbox,
        life: Life,
        deliver: Callable[[list[TokenDelta]], None],
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._life = life
        self._deliver = deliver
        self._running: set[str] = set()

    def run(self, until: Callable[[], bool]) -> None:
        """Serve until ``until`` is true.

        Raises:
            EngineDead: a rank or the scheduler is lost; the deltas of what was running are
                delivered first.
        """
        try:
            while not until():
                self._take_messages()
                self._poll(_POLL_S if self._running else 0.0)
        except EngineDead as error:
            self._life.die(str(error))
            raise

    def _poll(self, timeout_s: float) -> None:
        deltas = self._engine.poll(timeout_s)
        if not deltas:
            return
        self._running.difference_update(delta.req_id for delta in deltas if delta.finish_reason)
        lost = [delta.error or "" for delta in deltas if delta.engine_ended]
        if lost:
            self._life.die(lost[0])
        self._deliver(deltas)
        if lost:
            self._await_cause(lost[0])

    def _await_cause(self, sign: str) -> NoReturn:
        """Who was lost is known a moment after what that did to requests."""
        deadline = time.monotonic() + _CAUSE_S
        while time.monotonic() < deadline:
            self._deliver(self._engine.poll(_IDLE_S))
        raise EngineDead(sign)

    def _take_messages(self) -> None:
        """All there are; with nothing to do otherwise, waits a moment for the first."""
        with suppress(Empty):
            if not self._running:
                self._hand_over(self._inbox.get(timeout=_IDLE_S))
            while True:
                self._hand_over(self._inbox.get_nowait())

    def _hand_over(self, message: FrontEndMessage | None) -> None:
        if isinstance(message, AddRequest):
            self._running.add(message.req_id)
            self._engine.add(message)
        elif message is not None:
            self._engine.abort(message.req_id)
