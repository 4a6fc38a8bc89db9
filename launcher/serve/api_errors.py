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

    def __init__(self, status: int, type: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        detail = ErrorDetail(message=message, type=type, param=param, code=status)
        self.body = msgspec.json.encode(ErrorBody(detail))

    def response(self) -> Response:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status == 503 else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.body, self.status, headers, "application/json")


def bad_request(message: str, fields: Collection[str] = ()) -> ApiError:
    """400. The field, if the message begins with one of ``fields``, is named in ``param`` too."""
    found = re.match(r"\w+", message)
    param = found[0] if found and found[0] in fields else None
    return ApiError(400, "invalid_request_error", message, param=param)


def unavailable(message: str) -> ApiError:
    return ApiError(503, "service_unavailable_error", message)


def internal(message: str) -> ApiError:
    return ApiError(500, "internal_server_error", message)
