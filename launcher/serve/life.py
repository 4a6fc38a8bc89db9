"""Where a server stands between its start and its end, as its probes tell it."""

import enum
import time
from typing import Any

from lockstep.launcher.serve.api_errors import unavailable


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Life:
    """Changed by the main thread and its signal handlers, read by the HTTP thread."""

    def __init__(self) -> None:
        self.state = State.LOADING
        self.reason = "starting"
        self._began = time.monotonic()

    def stage(self, stage: str, done: int, total: int) -> None:
        """How far the start is; an ``engine.Progress``."""
        self.reason = f"{stage} {done}/{total}" if total > 1 else stage

    def ready(self) -> None:
        self.state, self.reason = State.READY, ""

    def drain(self) -> None:
        self.state, self.reason = State.DRAINING, "the server is shutting down"

    def die(self, reason: str) -> None:
        """The engine has failed. Nothing that comes later changes that."""
        self.state, self.reason = State.DEAD, reason

    def check_open(self) -> None:
        """Raises ApiError 503, with the reason, unless new work is taken."""
        if self.state is not State.READY:
            raise unavailable(self.describe())

    def describe(self) -> str:
        return f"{self.state.value}: {self.reason}" if self.reason else self.state.value

    def report(self) -> dict[str, Any]:
        """What ``/ready`` tells."""
        seconds = round(time.monotonic() - self._began, 1)
        told = {"status": self.state.value, "uptime_seconds": seconds}
        if self.state is State.LOADING:
            return told | {"stage": self.reason}
        return told | {"reason": self.reason} if self.reason else told
