"""Where other threads meet the scheduler's thread: requests in, deltas out."""

from collections import deque
from collections.abc import Iterable
from threading import Condition, Event, Lock

from lockstep.comm.errors import CommError
from lockstep.comm.messages import AbortRequest, AddRequest, FrontEndMessage, TokenDelta


class Inbox:
    """Requests and aborts on their way in. ``wake`` is set when there are any."""

    def __init__(self) -> None:
        self.wake = Event()
        self._messages: deque[FrontEndMessage] = deque()
        self._live: set[str] = set()
        self._closed: str | None = None
        self._lock = Lock()

    def add(self, request: AddRequest) -> None:
        """Take a request.

        Raises:
            ValueError: the id is in use, so that its deltas could not be told apart.
            CommError: nobody takes requests any more.
        """
        with self._lock:
            if self._closed is not None:
                raise CommError(f"no request is taken any more: {self._closed}")
            if request.req_id in self._live:
                raise ValueError(f"req_id must not be in use, got {request.req_id!r} twice")
            self._live.add(request.req_id)
        self._messages.append(request)
        self.wake.set()

    def abort(self, req_id: str) -> None:
        self._messages.append(AbortRequest(req_id))
        self.wake.set()

    def take(self) -> list[FrontEndMessage]:
        """All messages so far, in order."""
        self.wake.clear()
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def forget(self, deltas: Iterable[TokenDelta]) -> None:
        """Let the ids of requests that ended be used again."""
        ended = [delta.req_id for delta in deltas if delta.finish_reason is not None]
        if ended:
            with self._lock:
                self._live.difference_update(ended)

    def close(self, reason: str) -> list[str]:
        """Take no more, and return the ids of all requests that have not ended."""
        with self._lock:
            self._closed = reason
            live, self._live = sorted(self._live), set()
        return live


class Outbox:
    """Deltas on their way out; once closed with an error, that follows the last of them."""

    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []
        self._error: Exception | None = None
        self._arrived = Condition()

    def put(self, deltas: list[TokenDelta]) -> None:
        if deltas:
            with self._arrived:
                self._deltas += deltas
                self._arrived.notify_all()

    def close(self, error: Exception) -> None:
        with self._arrived:
            self._error = error
            self._arrived.notify_all()

    def take(self, timeout_s: float) -> list[TokenDelta]:
        """Deltas so far; waits up to ``timeout_s`` for the first."""
        with self._arrived:
            if not self._deltas and self._error is None:
                self._arrived.wait(timeout_s)
            deltas, self._deltas = self._deltas, []
            if not deltas and self._error is not None:
                raise self._error
            return deltas
