"""Failures of one call, in the shape and with the status that OpenAI's clients know."""

import re
from collections.abc import Collection

import msgspec
from starlette.responses import Response

RETRY_AFTER_S = 1


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """A call that cannot be answered. 503 tells the client that it may try again."""

    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        named = None if param is None else _sendable(param)
        detail = ErrorDetail(message=_sendable(message), type=kind, param=named, code=status)
        self.body = msgspec.json.encode(ErrorBody(detail))

    def response(self) -> Response:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status == 503 else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.body, self.status, headers, "application/json")


def _sendable(text: str) -> str:
    """Half characters, which JSON of a client can spell and ours cannot, as escapes."""
    return text.encode(errors="backslashreplace").decode()


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400; ``param`` is the field that is wrong, if it is one field."""
    return ApiError(400, "invalid_request_error", message, param=param)


def refused_value(message: str, fields: Collection[str]) -> ApiError:
    """400 for what a check of values says: if it is about one of ``fields`` it begins with it."""
    found = re.match(r"\w+", message)
    return bad_request(message, found[0] if found and found[0] in fields else None)


def unavailable(message: str) -> ApiError:
    return ApiError(503, "service_unavailable_error", message)


def internal(message: str) -> ApiError:
    return ApiError(500, "internal_server_error", message)
