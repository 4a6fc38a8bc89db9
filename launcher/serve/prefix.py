"""A server that a proxy shows under a path of its own."""

from starlette.types import ASGIApp, Receive, Scope, Send


class Prefix:
    """Middleware: routes are found with ``path`` before them and without it."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = "/" + path.strip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["root_path"] = self._path
        await self._app(scope, receive, send)
