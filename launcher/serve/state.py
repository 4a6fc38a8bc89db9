"""What all handlers of one server share."""

from dataclasses import dataclass, field

from starlette.requests import Request

from lockstep.launcher.serve.body import Record, read_record
from lockstep.launcher.serve.life import Life
from lockstep.launcher.serve.options import ServeOptions
from lockstep.launcher.serve.service import Service
from lockstep.worker.heap import Heap

_MAX_NAME = 256


@dataclass
class ServerState:
    """``service`` is None until the engine can serve."""

    options: ServeOptions
    life: Life = field(default_factory=Life)
    heap: Heap = field(default_factory=Heap)
    service: Service | None = None

    def open(self, service: Service) -> None:
        """From now on calls are answered."""
        self.service = service
        self.life.ready()

    def open_service(self) -> Service:
        """Raises ApiError 503, with the reason, unless new work is taken."""
        self.life.check_open()
        assert self.service is not None
        return self.service


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def read_call(request: Request) -> tuple[Service, Record]:
    """The service, and what the client sent.

    Raises:
        ApiError: 503 unless calls are answered; 400, 413 for a body that cannot be read.
    """
    state = state_of(request)
    state.open_service()
    record = await read_record(request, state.options.max_request_bytes)
    return state.open_service(), record


def name_of(request: Request, request_id: str | None) -> str | None:
    """What the client calls its request, in its header or its body."""
    name = request.headers.get("x-request-id") or request_id
    return name[:_MAX_NAME] if name else None
