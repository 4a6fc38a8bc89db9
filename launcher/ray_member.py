"""An actor as the supervisor sees it: its long calls, its heartbeats, its end."""

import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayTaskError

from lockstep.comm.errors import CommError
from lockstep.launcher.processes import ProcessId
from lockstep.launcher.rank_host import IDLE, Beat
from lockstep.launcher.supervise import Failure, Role, Sign

# Ray knows more about an exit than that it has happened, and tells within this time.
_RAY_TELLS_S = 1.0
BEAT_EVERY_S = 0.5


class RayMember:
    """Watches one actor. A call that raises is its failure."""

    def __init__(self, role: Role, name: str, handle: Any) -> None:
        self.role = role
        self.name = name
        self.handle = handle
        self.process: ProcessId | None = None
        self.beat = Beat(IDLE)
        self._watched: list[ray.ObjectRef[Any]] = []
        self._gone_since = 0.0
        self._heard_at = 0.0
        self._asked: ray.ObjectRef[Beat] | None = None

    def call(self, method: str, *args: object) -> "ray.ObjectRef[Any]":
        """Call a method of the actor; the member has failed if it raises."""
        ref: ray.ObjectRef[Any] = getattr(self.handle, method).remote(*args)
        self._watched = [*self._watched, ref]
        return ref

    @property
    def last_step(self) -> int | None:
        return self.beat.last_step

    def failure(self) -> Failure | None:
        done, _ = ray.wait(self._watched, num_returns=len(self._watched), timeout=0)
        for ref in done:
            try:
                ray.get(ref)
            except Exception as error:
                return describe(error)
        if self.process is None or not self.process.gone:
            self._gone_since = time.monotonic()
        elif time.monotonic() - self._gone_since > _RAY_TELLS_S:
            return Failure(Sign.DIED, "died: its process is gone, and Ray has not said why")
        return None

    def heard(self) -> bool:
        if self._asked is None:
            if time.monotonic() - self._heard_at < BEAT_EVERY_S:
                return True
            self._asked = self.handle.beat.remote()
        done, _ = ray.wait([self._asked], timeout=0)
        if not done:
            return False
        asked, self._asked = self._asked, None
        # An actor that cannot be reached is silent; its watched calls tell whether it is dead.
        with suppress(RayActorError, OutOfMemoryError):
            self.beat = ray.get(asked)
            self._heard_at = time.monotonic()
            return True
        return False

    def kill(self) -> None:
        ray.kill(self.handle, no_restart=True)


def describe(error: Exception) -> Failure:
    """What an actor's error says about the actor."""
    if isinstance(error, ActorDiedError):
        return Failure(Sign.DIED, f"died: {_reason(str(error))}")
    if isinstance(error, RayActorError):
        return Failure(Sign.DIED, f"cannot be reached: {_reason(str(error))}")
    if isinstance(error, OutOfMemoryError):
        what, *_ = str(error).splitlines()
        return Failure(Sign.DIED, f"was ended by Ray: {what}")
    cause = error.cause if isinstance(error, RayTaskError) else error
    sign = Sign.SAW_ANOTHER_FAIL if isinstance(cause, CommError) else Sign.RAISED
    return Failure(sign, f"failed: {type(cause).__name__}: {cause}", error)


def _reason(text: str) -> str:
    """Ray's report in one line, without the actor's properties and the list of common causes."""
    lines = [line.strip() for line in text.splitlines() if not line.startswith("\t")]
    told = " ".join(line for line in lines if line)
    told = told.partition(" Some common causes")[0]
    # How the process ended, where Ray knows it, says all that stands before it.
    return told[max(told.find("Worker exit type"), 0) :]
