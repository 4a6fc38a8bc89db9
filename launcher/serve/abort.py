"""``/abort``: end a call from outside."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lockstep.launcher.serve.body import json_response, read_record, take_fields
from lockstep.launcher.serve.state import state_of


class AbortCall(msgspec.Struct, frozen=True):
    """``request_id``: the ``id`` of an answer, or the x-request-id that its client sent."""

    request_id: str


async def abort(request: Request) -> Response:
    """End all choices of a call; they end with finish_reason "abort" and what they have so far.

    Tells how many requests that were. None is no error: it may just have finished.

    Raises:
        ApiError: 400 without a ``request_id``.
    """
    state = state_of(request)
    record = await read_record(request, state.options.max_request_bytes)
    call = take_fields(record, AbortCall)
    count = state.service.router.abort(call.request_id) if state.service else 0
    return json_response({"aborted": count})
