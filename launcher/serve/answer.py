"""A generation as the answer to a call: all at once, or as a stream of events."""

import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lockstep.launcher.serve.api_errors import ApiError, internal
from lockstep.launcher.serve.body import json_response
from lockstep.launcher.serve.call import StreamOptions
from lockstep.launcher.serve.disconnect import unless_gone
from lockstep.launcher.serve.generation import Generation
from lockstep.launcher.serve.shape import Shape

logger = logging.getLogger(__name__)

OpenGeneration = Callable[[], AbstractContextManager[Generation]]
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would hold tokens back.
    (b"x-accel-buffering", b"no"),
]
# A name may come from a body, where it may hold what would end a header.
_UNSAFE = re.compile(r"[^ -~]")
_encode = msgspec.json.Encoder().encode


class Answer(Response):
    """Runs a generation for as long as its client is there.

    Args:
        begin: admits the call; the generation is aborted when its context is left early.
        shape: of the API.
        stream: None answers all at once.
    """

    def __init__(self, begin: OpenGeneration, shape: Shape, stream: StreamOptions | None) -> None:
        super().__init__()
        self._begin = begin
        self._shape = shape
        self._stream_options = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._begin() as generation:
            name = (b"x-request-id", _UNSAFE.sub("?", generation.name).encode())
            if self._stream_options is not None:
                frames = self._frames(generation, self._stream_options)
                await _send_stream(send, [*_STREAM_HEADERS, name], frames)
                return
            async for _ in generation.events():
                pass
            response = json_response(self._shape.whole(generation))
            response.raw_headers.append(name)
            await response(scope, receive, send)

    async def _frames(self, generation: Generation, options: StreamOptions) -> AsyncIterator[bytes]:
        shape, opened = self._shape, False
        async for event in generation.events():
            if not opened:
                opened = True
                for opening in shape.openings(generation):
                    yield frame(opening)
            chunk = shape.chunk(generation, event)
            if options.continuous_usage_stats:
                chunk = shape.with_usage(generation, chunk)
            yield frame(chunk)
        if options.include_usage:
            yield frame(shape.usage_chunk(generation))


def frame(chunk: msgspec.Struct) -> bytes:
    """One event: ``data: {json}`` and an empty line; readers take nothing else."""
    return b"data: " + _encode(chunk) + b"\n\n"


async def _send_stream(
    send: Send, headers: list[tuple[bytes, bytes]], frames: AsyncIterator[bytes]
) -> None:
    """Send frames; the status waits for the first, so that an early failure has its own."""
    started = False
    try:
        async for data in frames:
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send(_body(data))
    except Exception as error:
        if not started:
            raise
        await send(_body(b"data: " + _as_api_error(error).body + b"\n\n"))
    await send(_body(_DONE, more=False))


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    logger.exception("while streaming an answer")
    return internal(type(error).__name__)
