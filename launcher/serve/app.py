"""The ASGI application: which path is answered by what, and how failures look."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lockstep.launcher.serve import probes
from lockstep.launcher.serve.abort import abort
from lockstep.launcher.serve.api_errors import ApiError, internal
from lockstep.launcher.serve.auth import KeyCheck
from lockstep.launcher.serve.chat import chat_completions
from lockstep.launcher.serve.completions import completions
from lockstep.launcher.serve.cross_origin import with_cors
from lockstep.launcher.serve.models import list_models, show_model
from lockstep.launcher.serve.prefix import Prefix
from lockstep.launcher.serve.state import ServerState
from lockstep.launcher.serve.tokens import detokenize, tokenize

_CLIENT_CLOSED = 499
_POST, _GET, _BOTH = ["POST"], ["GET"], ["GET", "POST"]
_ROUTES = [
    Route("/v1/completions", completions, methods=_POST),
    Route("/v1/chat/completions", chat_completions, methods=_POST),
    Route("/v1/models", list_models, methods=_GET),
    Route("/v1/models/{name:path}", show_model, methods=_GET),
    Route("/tokenize", tokenize, methods=_POST),
    Route("/detokenize", detokenize, methods=_POST),
    Route("/abort", abort, methods=_POST),
    Route("/health", probes.health, methods=_GET),
    Route("/ping", probes.health, methods=_BOTH),
    Route("/ready", probes.ready, methods=_GET),
    Route("/version", probes.show_version, methods=_GET),
    Route("/load", probes.load, methods=_GET),
    Route("/metrics", probes.metrics, methods=_GET),
]


def create_app(state: ServerState) -> ASGIApp:
    """An application over ``state``, which may become ready later."""
    keys, prefix = state.options.api_key, state.options.root_path
    app = Starlette(
        routes=_ROUTES,
        middleware=[
            *([Middleware(Prefix, path=prefix)] if prefix else []),
            *([Middleware(KeyCheck, keys=keys)] if keys else []),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            Exception: _unforeseen,
        },
    )
    app.state.server = state
    return with_cors(app, state.options)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Of the routing: no such path, no such method."""
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = ApiError(error.status_code, kind, message).response()
    response.headers.update(error.headers or {})
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


async def _unforeseen(request: Request, error: Exception) -> Response:
    return internal(type(error).__name__).response()
