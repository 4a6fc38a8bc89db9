"""The choices of one call, from their admission to their end."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from lockstep.comm.messages import AddRequest, TokenDelta
from lockstep.launcher.outputs import OutputAssembler, Piece, RequestOutput
from lockstep.launcher.prepare import PreparedRequest
from lockstep.launcher.serve.api_errors import ApiError, internal, refused_value, unavailable
from lockstep.launcher.structured import FIELD
from lockstep.launcher.tokenize import AnyTokenizer


class Event(NamedTuple):
    """Something to show of a choice; ``finish_reason`` with its last."""

    choice: int
    piece: Piece
    finish_reason: str | None


class Generation:
    """What is made of one call. Lives in the HTTP thread.

    Args:
        answer_id: unique in this server.
        name: what the client calls it; it need not be unique.
        requests: one a choice, in order.
        on_event: is told the choice of each event.

    ``num_completion_tokens`` are those of the events that were taken.
    """

    def __init__(
        self,
        answer_id: str,
        requests: Sequence[PreparedRequest],
        tokenizer: AnyTokenizer,
        on_event: Callable[[int], None],
        *,
        name: str | None = None,
    ) -> None:
        self.id = answer_id
        self.name = name or answer_id
        self.created = int(time.time())
        self.num_completion_tokens = 0
        self._requests = {f"{answer_id}-{index}": request for index, request in enumerate(requests)}
        self._assemblers = {
            req_id: OutputAssembler(index, request, tokenizer)
            for index, (req_id, request) in enumerate(self._requests.items())
        }
        self.unfinished = set(self._requests)
        self._on_event = on_event
        self._events: deque[Event] = deque()
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def to_add(self) -> list[AddRequest]:
        return [request.to_add(req_id) for req_id, request in self._requests.items()]

    def take(self, delta: TokenDelta) -> Event | None:
        """Make text of a delta; None if it was an error, which ends the whole call."""
        assembler = self._assemblers[delta.req_id]
        piece = assembler.push(delta)
        reason = assembler.finish_reason
        if reason == "error":
            self.fail(_failure(delta))
            return None
        if reason is not None:
            self.unfinished.discard(delta.req_id)
        event = Event(assembler.index, piece, reason)
        self._on_event(assembler.index)
        self._events.append(event)
        self._changed.set()
        return event

    def fail(self, error: ApiError) -> None:
        """End the call with an error, unless it has failed before."""
        self._error = self._error or error
        self._changed.set()

    async def events(self) -> AsyncIterator[Event]:
        """Everything there is to show, as it comes, until all choices have ended.

        Raises:
            ApiError: the call has failed; what came before that is yielded first.
        """
        while True:
            while self._events:
                event = self._events.popleft()
                self.num_completion_tokens += len(event.piece.token_ids)
                yield event
            if self._error is not None:
                raise self._error
            if not self.unfinished:
                return
            self._changed.clear()
            await self._changed.wait()

    def prompt_counts(self, n: int) -> tuple[int, int]:
        """Tokens of the prompts, each once for its ``n`` choices; and how many were cached."""
        firsts = list(self._assemblers.values())[::n]
        cached = sum(first.num_cached_tokens for first in firsts)
        return sum(first.num_prompt_tokens for first in firsts), cached

    def outputs(self) -> list[RequestOutput]:
        """Of every choice what there is of it, in order."""
        return [assembler.output() for assembler in self._assemblers.values()]


def _failure(delta: TokenDelta) -> ApiError:
    message = delta.error or "the request failed"
    if delta.engine_ended:
        return unavailable(message)
    return refused_value(message, (FIELD,)) if delta.bad_request else internal(message)
