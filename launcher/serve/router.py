"""Which generation a delta belongs to. Everything here runs in the HTTP thread."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lockstep.comm.messages import AbortRequest, TokenDelta
from lockstep.launcher.serve.api_errors import ApiError, internal
from lockstep.launcher.serve.engine_loop import Inbox
from lockstep.launcher.serve.generation import Generation
from lockstep.launcher.serve.metrics import Metrics

logger = logging.getLogger(__name__)


class Router:
    """Sends the requests of generations to the engine's thread and hands out what comes back."""

    def __init__(self, inbox: Inbox, metrics: Metrics) -> None:
        self._inbox = inbox
        self._metrics = metrics
        self._by_req_id: dict[str, Generation] = {}
        self._closed: ApiError | None = None

    @contextmanager
    def serve(self, generation: Generation) -> Iterator[Generation]:
        """Run it; what has not ended at the end of the context is aborted.

        Raises:
            ApiError: nothing is taken any more.
        """
        if self._closed is not None:
            raise self._closed
        for request in generation.to_add():
            self._by_req_id[request.req_id] = generation
            self._inbox.put(request)
        try:
            yield generation
        finally:
            self._abort(generation)
            for req_id in generation.unfinished:
                self._by_req_id.pop(req_id, None)
                self._metrics.finished("error" if generation.failed else "abort")

    def deliver(self, deltas: Sequence[TokenDelta]) -> None:
        """Deltas of requests that have ended here may still come, and are dropped."""
        for delta in deltas:
            generation = self._by_req_id.get(delta.req_id)
            if generation is not None:
                self._hand_out(generation, delta)

    def abort(self, name: str) -> int:
        """End the generations of this id or name; what they have so far is their answer.

        Returns: how many requests were told to end.
        """
        found = {g.id: g for g in self._by_req_id.values() if name in (g.id, g.name)}
        return sum(self._abort(generation) for generation in found.values())

    def close(self, error: ApiError) -> None:
        """Fail everything that runs, and whatever comes later."""
        self._closed = error
        for generation in set(self._by_req_id.values()):
            generation.fail(error)

    def _abort(self, generation: Generation) -> int:
        for req_id in generation.unfinished:
            self._inbox.put(AbortRequest(req_id))
        return len(generation.unfinished)

    def _hand_out(self, generation: Generation, delta: TokenDelta) -> None:
        # Whatever one request does to us, the others go on.
        try:
            event = generation.take(delta)
        except Exception as error:
            logger.exception("request %s", delta.req_id)
            generation.fail(internal(f"{type(error).__name__} while reading the answer"))
            return
        if event is None:
            return
        self._metrics.advanced(len(event.piece.token_ids))
        if event.finish_reason is not None:
            del self._by_req_id[delta.req_id]
            self._metrics.finished(event.finish_reason)
            if delta.finish_reason is None:
                # A stop string ended it, of which the engine does not know.
                self._inbox.put(AbortRequest(delta.req_id))
