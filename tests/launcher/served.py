"""The HTTP application over an engine, called without sockets, with clients that may leave."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from starlette.types import ASGIApp

from lockstep.launcher.config import build_config
from lockstep.launcher.engine import EngineClient
from lockstep.launcher.errors import EngineDead
from lockstep.launcher.front_end import StartEngine, open_front_end
from lockstep.launcher.serve.admission import create_admission
from lockstep.launcher.serve.api_errors import unavailable
from lockstep.launcher.serve.app import create_app
from lockstep.launcher.serve.engine_loop import EngineLoop, Inbox
from lockstep.launcher.serve.options import ServeOptions
from lockstep.launcher.serve.service import create_service
from lockstep.launcher.serve.state import ServerState

_PATIENCE_S = 60.0


@dataclass
class Reply:
    """What a client has received; ``status`` 0 if nothing."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """The error of a refused call, whose shape is checked."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == self.status
        return error

    def events(self) -> list[dict[str, Any]]:
        """Data of a stream, whose framing is checked; without the closing ``[DONE]``."""
        frames = self.body.decode().split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        assert all(frame.startswith("data: {") for frame in frames[:-2])
        return [json.loads(frame[6:]) for frame in frames[:-2]]

    def texts(self, index: int = 0) -> list[str]:
        """Of a stream the pieces of one choice."""
        choices = [c for event in self.events() for c in event["choices"] if c["index"] == index]
        return [c["text"] if "text" in c else c["delta"]["content"] for c in choices]


@dataclass
class Visit:
    """When a client leaves: after so many parts of the answer, after a time, or when told.

    It reads a part in ``pause_s``.
    """

    leave_after: int | None = None
    leave_after_s: float | None = None
    pause_s: float = 0.0
    leave: asyncio.Event = field(default_factory=asyncio.Event)


async def ask(
    app: ASGIApp,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    visit: Visit | None = None,
    method: str | None = None,
) -> Reply:
    """POST ``body`` (bytes, or what becomes JSON); GET if there is none and no other method."""
    visit, reply = visit or Visit(), Reply()
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    unread = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await visit.leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        elif message["body"]:
            reply.parts.append(message["body"])
        if visit.leave_after is not None and len(reply.parts) >= visit.leave_after:
            visit.leave.set()
        await asyncio.sleep(visit.pause_s)

    scope = {
        "type": "http", "method": method or ("GET" if body is None else "POST"), "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        "http_version": "1.1", "client": ("test", 1), "server": ("test", 2),
    }  # fmt: skip
    if visit.leave_after_s is not None:
        asyncio.get_running_loop().call_later(visit.leave_after_s, visit.leave.set)
    try:
        await app(scope, receive, send)
    except Exception:
        # A failure that the client was told of is raised too, for the log of the HTTP server.
        if reply.status != 500:
            raise
    return reply


class Served:
    """The application, its HTTP thread and its engine's thread."""

    def __init__(self, state: ServerState, engine: EngineClient) -> None:
        self.state = state
        self.engine = engine
        self.app = create_app(state)
        self.death: EngineDead | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = threading.Event()

    def ask(
        self,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        visit: Visit | None = None,
    ) -> Reply:
        return self.run(ask(self.app, path, body, headers, visit))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.start(work).result(_PATIENCE_S)

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @contextmanager
    def running(self, inbox: Inbox) -> Iterator["Served"]:
        http = threading.Thread(target=self._loop.run_forever)
        http.start()
        engine = threading.Thread(target=self._serve, args=[inbox])
        engine.start()
        try:
            yield self
        finally:
            self._stop.set()
            inbox.put(None)
            engine.join()
            self._loop.call_soon_threadsafe(self._loop.stop)
            http.join()
            self._loop.close()

    def _serve(self, inbox: Inbox) -> None:
        service = self.state.service
        assert service is not None

        def deliver(deltas: Any) -> None:
            self._loop.call_soon_threadsafe(service.router.deliver, deltas)

        try:
            EngineLoop(self.engine, inbox, self.state.life, deliver).run(self._stop.is_set)
        except EngineDead as error:
            self.death = error
            self._loop.call_soon_threadsafe(service.router.close, unavailable(str(error)))


@contextmanager
def serving(
    model: str, start: StartEngine, *, options: ServeOptions | None = None, **settings: Any
) -> Iterator[Served]:
    """``lockstep serve`` of a model without its sockets and signals."""
    config = build_config({"model": model, "device": "cpu", **settings})
    front = open_front_end(config, start, lambda stage, done, total: None)
    state, inbox = ServerState(options or ServeOptions()), SimpleQueue()
    queued = config.max_num_queued_reqs
    admission = create_admission(front.resolved.worker, queued, state.options)
    state.open(create_service(front, inbox, admission))
    try:
        with Served(state, front.engine).running(inbox) as served:
            yield served
    finally:
        front.engine.shutdown()


def await_true(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def gather(*asked: Any) -> list[Any]:
    return list(await asyncio.gather(*asked))
