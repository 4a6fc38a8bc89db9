"""Which generation a delta belongs to. Everything here runs in the HTTP thread."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from lockstep.comm.messages import ID_BYTES, AbortRequest, TokenDelta
from lockstep.launcher.metrics.requests import RequestClock, RequestMetrics
from lockstep.launcher.serve.api_errors import ApiError, internal
from lockstep.launcher.serve.engine_loop import Inbox
from lockstep.launcher.serve.generation import Event, Generation

logger = logging.getLogger(__name__)


class _Route(NamedTuple):
    generation: Generation
    clock: RequestClock


class Router:
    """Sends the requests of generations to the engine's thread and hands out what comes back."""

    def __init__(self, inbox: Inbox, metrics: RequestMetrics) -> None:
        self._inbox = inbox
        self._metrics = metrics
        self._routes: dict[str, _Route] = {}
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
            clock = self._metrics.accept(request.req_id, len(request.prompt_ids) // ID_BYTES)
            self._routes[request.req_id] = _Route(generation, clock)
            self._inbox.put(request)
        try:
            yield generation
        finally:
            self._abort(generation)
            reason, now = "error" if generation.failed else "abort", time.monotonic()
            for req_id in generation.unfinished:
                self._routes.pop(req_id).clock.finish(reason, now)

    def deliver(self, deltas: Sequence[TokenDelta]) -> None:
        """Deltas of requests that have ended here may still come, and are dropped."""
        now = time.monotonic()
        for delta in deltas:
            route = self._routes.get(delta.req_id)
            if route is not None:
                self._hand_out(route, delta, now)

    def abort(self, name: str) -> int:
        """End the generations of this id or name; what they have so far is their answer.

        Returns: how many requests were told to end.
        """
        running = (route.generation for route in self._routes.values())
        found = {each.id: each for each in running if name in (each.id, each.name)}
        return sum(self._abort(generation) for generation in found.values())

    def close(self, error: ApiError) -> None:
        """Fail everything that runs, and whatever comes later."""
        self._closed = error
        for generation in {route.generation for route in self._routes.values()}:
            generation.fail(error)

    def _abort(self, generation: Generation) -> int:
        for req_id in generation.unfinished:
            self._inbox.put(AbortRequest(req_id))
        return len(generation.unfinished)

    def _hand_out(self, route: _Route, delta: TokenDelta, now: float) -> None:
        generation = route.generation
        # Whatever one request does to us, the others go on.
        try:
            event = generation.take(delta)
        except Exception as error:
            logger.exception("request %s", delta.req_id)
            generation.fail(internal(f"{type(error).__name__} while reading the answer"))
            return
        if event is None:
            return
        _count(route.clock, event, delta, now)
        if event.finish_reason is not None:
            del self._routes[delta.req_id]
            if delta.finish_reason is None:
                # A stop string ended it, of which the engine does not know.
                self._inbox.put(AbortRequest(delta.req_id))


def _count(clock: RequestClock, event: Event, delta: TokenDelta, now: float) -> None:
    # Who counts must never be what fails.
    try:
        clock.advance(delta.dp_rank, len(event.piece.token_ids), now)
        if event.finish_reason is not None:
            clock.finish(event.finish_reason, now, delta.dp_rank)
    except Exception:
        logger.exception("while counting request %s", delta.req_id)
