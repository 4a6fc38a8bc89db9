"""The life of a server: bind, load, serve, drain, end."""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue

import msgspec

from lockstep.comm.messages import TokenDelta
from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.engine import EngineClient, Progress
from lockstep.launcher.errors import EngineDead, LaunchError
from lockstep.launcher.front_end import StartEngine, open_front_end
from lockstep.launcher.metrics.traces import OnEnd, tracing
from lockstep.launcher.progress import stages
from lockstep.launcher.serve.admission import create_admission
from lockstep.launcher.serve.api_errors import unavailable
from lockstep.launcher.serve.app import create_app
from lockstep.launcher.serve.collector import IdleCollector
from lockstep.launcher.serve.drain import Drain
from lockstep.launcher.serve.engine_loop import EngineLoop, Inbox
from lockstep.launcher.serve.http_server import HttpServer
from lockstep.launcher.serve.listen import listening_socket, url_of
from lockstep.launcher.serve.open_files import allow_many_files
from lockstep.launcher.serve.options import ServeOptions
from lockstep.launcher.serve.service import Service, create_service
from lockstep.launcher.serve.state import ServerState
from lockstep.launcher.serve.stopping import Stopping
from lockstep.launcher.start_report import start_report

# Long enough for a probe that comes every second to hear of which rank an engine died.
_LAST_WORDS_S = 2.0


def serve(config: LaunchConfig, options: ServeOptions, start_engine: StartEngine) -> int:
    """Serve until a signal or a failure; returns 0 after a signal. Main thread only.

    Raises:
        ConfigError: the address cannot be bound, or settings that cannot work.
        EngineDead: a rank or the scheduler was lost while serving.
        LaunchError: the engine cannot start.
    """
    allow_many_files()
    server = _Server(config, options, start_engine)
    try:
        with listening_socket(options) as sock:
            return server.run(sock)
    except KeyboardInterrupt:
        _say("asked to stop while loading")
        return 0


class _Server:
    def __init__(
        self, config: LaunchConfig, options: ServeOptions, start_engine: StartEngine
    ) -> None:
        self._config = config
        self._options = options
        self._start_engine = start_engine
        self._state = ServerState(options)
        self._inbox: Inbox = SimpleQueue()
        self._stopping = Stopping(self._state.life, self._inbox, options.shutdown_timeout)

    def run(self, sock: socket.socket) -> int:
        http = HttpServer(create_app(self._state), sock, self._options)
        with self._stopping.listening(), http.running(), self._tracing() as on_end:
            _say(f"listening on {url_of(sock, self._options)}")
            with self._engine() as (engine, service):
                for line in start_report(engine.summary()):
                    _say(line)
                with self._state.heap.frozen(), IdleCollector() as collector:
                    service.metrics.on_end = on_end
                    self._state.open(service)
                    _say(f"{service.card.id} is ready")
                    self._serve(engine, service, http, collector)
        return 0

    def _tracing(self) -> AbstractContextManager[OnEnd | None]:
        endpoint = self._options.otlp_traces_endpoint
        if endpoint is None:
            return nullcontext()
        return tracing(endpoint, self._config.model_names[0])

    @contextmanager
    def _engine(self) -> Iterator[tuple[EngineClient, Service]]:
        """An engine that can serve. Its death is told to probes before it is ended."""
        # The queue is bounded before the engine, where a refusal is a status and costs nothing.
        config = msgspec.structs.replace(self._config, max_num_queued_reqs=None)
        with stages() as lines:
            front = open_front_end(config, self._start_engine, self._told_to(lines))
        engine, queued = front.engine, self._config.max_num_queued_reqs
        try:
            admission = create_admission(front.resolved.worker, queued, self._options)
            yield engine, create_service(front, self._inbox, admission)
        except EngineDead:
            engine.shutdown()
            time.sleep(_LAST_WORDS_S)
            raise
        finally:
            engine.shutdown()

    def _told_to(self, lines: Progress) -> Progress:
        def progress(stage: str, done: int, total: int) -> None:
            self._state.life.stage(stage, done, total)
            lines(stage, done, total)

        return progress

    def _serve(
        self, engine: EngineClient, service: Service, http: HttpServer, collector: IdleCollector
    ) -> None:
        """Until all work is done after a signal, or the time for that is over."""

        def deliver(deltas: list[TokenDelta]) -> None:
            http.call(lambda: service.router.deliver(deltas))

        drain = Drain(self._stopping, service.admission, _say)

        def finished() -> bool:
            if not http.alive:
                raise LaunchError("the HTTP server has ended")
            collector.note(http.num_calls)
            return drain.over()

        last_words = "the server is shutting down"
        try:
            EngineLoop(engine, self._inbox, self._state.life, deliver).run(finished)
        except EngineDead as error:
            last_words = str(error)
            raise
        finally:
            ending = unavailable(last_words)
            http.call(lambda: service.router.close(ending))


def _say(text: str) -> None:
    sys.stderr.write(f"lockstep: {text}\n")
    sys.stderr.flush()
