"""The one thread that talks to the engine: requests in, deltas out, its failure as an exception."""

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from lockstep.comm.messages import AddRequest, FrontEndMessage, TokenDelta
from lockstep.launcher.engine import EngineClient

Inbox = SimpleQueue[FrontEndMessage | None]

# While requests run, one that comes waits at most this long; a step's deltas end the wait.
_POLL_S = 0.005
_IDLE_S = 0.2


class EngineLoop:
    """Feeds an engine from ``inbox``, whose None only wakes it.

    Args:
        deliver: is given deltas, in this thread.
    """

    def __init__(
        self, engine: EngineClient, inbox: Inbox, deliver: Callable[[list[TokenDelta]], None]
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._deliver = deliver
        self._running: set[str] = set()

    def run(self, until: Callable[[], bool]) -> None:
        """Serve until ``until`` is true.

        Raises:
            EngineDead: a rank or the scheduler is lost; the deltas of what was running are
                delivered first.
        """
        while not until():
            self._take_messages()
            deltas = self._engine.poll(_POLL_S if self._running else 0.0)
            if deltas:
                self._running.difference_update(d.req_id for d in deltas if d.finish_reason)
                self._deliver(deltas)

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
