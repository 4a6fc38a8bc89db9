"""The thread that speaks HTTP. The main thread keeps the engine and the signals."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from lockstep.launcher.errors import ConfigError, LaunchError
from lockstep.launcher.files import check_readable
from lockstep.launcher.serve.options import ServeOptions

_START_S = 30.0
# Answers that have ended get this long to reach their clients.
_FLUSH_S = 3
_STOP_S = 10.0
# Longer than proxies keep idle connections, so that they and not we close them.
_KEEP_ALIVE_S = 75


class HttpServer:
    """uvicorn in a thread of its own, on a socket that is bound already.

    Raises:
        ConfigError: the key or the certificate cannot be read.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, options: ServeOptions) -> None:
        if options.ssl_keyfile is not None and options.ssl_certfile is not None:
            check_readable("--ssl-keyfile", Path(options.ssl_keyfile))
            check_readable("--ssl-certfile", Path(options.ssl_certfile))
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FLUSH_S,
        )
        try:
            config.load()
        except OSError as error:
            raise ConfigError(f"ssl_keyfile and ssl_certfile: {error}") from error
        self._server = uvicorn.Server(config)
        self._socket = sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_calls(self) -> int:
        """Calls that are being answered, admitted or not."""
        return len(self._server.server_state.tasks)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answer calls; at the end take no more, and let answers that are being sent end.

        Raises:
            LaunchError: it does not come up.
        """
        self._thread.start()
        try:
            if not self._running.wait(_START_S) or not self.alive:
                raise LaunchError("the HTTP server does not start")
            yield
        finally:
            self._server.should_exit = True
            self._thread.join(_STOP_S)

    def call(self, callback: Callable[[], None]) -> None:
        """Have the thread run ``callback``, after those of earlier calls; lost if it has ended."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                runner.run(self._serve())
        finally:
            self._running.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._running.set)
        await self._server.serve(sockets=[self._socket])
