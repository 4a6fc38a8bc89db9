"""Who may call: everybody, or who knows a key."""

import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.launcher.serve.api_errors import ApiError

# Probes and scrapers have no keys.
OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/load", "/metrics"})


class KeyCheck:
    """Middleware: 401 for calls without ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope) and not self._knows(scope):
            error = ApiError(401, "authentication_error", "a valid API key is needed")
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1", "replace")
        matches = [secrets.compare_digest(key, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    return path in OPEN_PATHS or path.removeprefix(scope.get("root_path", "")) in OPEN_PATHS
