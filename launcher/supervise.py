"""Who watches whom, what dies with what, and which of several failures was the first cause.

Ray sees a dead actor and never a hung one, so every process also answers heartbeats. A failure
shows in many places at once: a killed rank is a lost peer for its group and a missing result for
the scheduler. The supervisor therefore gathers for a moment and reports the sign that stands
nearest to the cause.
"""

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from lockstep.launcher.processes import ProcessId, end_processes, wait_gone

logger = logging.getLogger(__name__)

PERIOD_S = 0.2
SETTLE_S = 0.8
HANG_S = 6.0
HANG_WHILE_STARTING_S = 60.0
POLITE_S = 1.5
END_TIMEOUT_S = 8.0


class Role(enum.Enum):
    DRIVER = "driver"
    SCHEDULER = "scheduler"
    WORKER = "worker"


# The one table of what dies with what. The driver's death is noticed by Ray and by the guard, the
# others' by the driver's supervisor. Weights could outlive a scheduler: then this is what changes.
DIES_WITH: dict[Role, frozenset[Role]] = {
    Role.DRIVER: frozenset({Role.SCHEDULER, Role.WORKER}),
    Role.SCHEDULER: frozenset({Role.SCHEDULER, Role.WORKER}),
    Role.WORKER: frozenset({Role.SCHEDULER, Role.WORKER}),
}


class Sign(enum.IntEnum):
    """How a failure shows; the least is nearest to its cause."""

    DIED = 0
    HUNG = 1
    RAISED = 2
    SAW_ANOTHER_FAIL = 3


class Failure(NamedTuple):
    """How one process failed, in words that follow its name; and what it raised, if it did."""

    sign: Sign
    text: str
    error: Exception | None = None


class Cause(NamedTuple):
    """The failure that an engine ends with, in words that name the process."""

    sign: Sign
    role: Role
    text: str
    error: Exception | None = None


class Member(Protocol):
    """A process of the engine as its supervisor sees it."""

    role: Role
    name: str

    @property
    def last_step(self) -> int | None: ...
    @property
    def process(self) -> ProcessId | None:
        """None while it is not known, or if it is on another host."""
        ...

    def failure(self) -> Failure | None: ...

    def heard(self) -> bool:
        """True if a sign of life has come since the last call; asks for the next one."""
        ...

    def kill(self) -> None: ...


class Supervisor:
    """Watches members until one fails; then keeps the cause and ends those that die with it."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._silence_s = [0.0] * len(members)
        self._hang_s = HANG_WHILE_STARTING_S
        self._stop = threading.Event()
        self._failed = threading.Event()
        self._cause: Cause | None = None
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def serving(self) -> None:
        """From now on a silent process is hung after ``HANG_S``."""
        self._silence_s = [0.0] * len(self._members)
        self._hang_s = HANG_S

    @property
    def cause(self) -> Cause | None:
        """Why the engine has ended or is being ended, if it is."""
        return self._cause if self._failed.is_set() else None

    def await_cause(self) -> Cause | None:
        """The cause of a failure that has shown elsewhere; None if no member has failed."""
        self._failed.wait(PERIOD_S + HANG_S + SETTLE_S)
        return self.cause

    def stop(self) -> None:
        """End the watch; a failure that it has seen by then is dealt with first."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def end_all(self) -> list[str]:
        """Kill every member and see it gone; names of those that are not. Tolerates the dead."""
        return _end(self._members)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(PERIOD_S):
            now = time.monotonic()
            # A pause of the whole machine is nobody's silence.
            causes = self._tick(min(now - last, 2 * PERIOD_S))
            last = now
            if causes:
                self._fail(self._settle(causes))
                return

    def _tick(self, elapsed_s: float) -> list[Cause]:
        causes = []
        for index, member in enumerate(self._members):
            failure = member.failure() or self._hung(index, member, elapsed_s)
            if failure is not None:
                causes.append(_cause(member, failure))
        return causes

    def _hung(self, index: int, member: Member, elapsed_s: float) -> Failure | None:
        silence_s = 0.0 if member.heard() else self._silence_s[index] + elapsed_s
        self._silence_s[index] = silence_s
        if silence_s < self._hang_s:
            return None
        return Failure(Sign.HUNG, f"hangs: no sign of life for {silence_s:.0f} s")

    def _settle(self, causes: list[Cause]) -> Cause:
        # Those who wait for a stopped process may have noticed it before its silence is a sign.
        stopped = [member for member in self._members if member.process and member.process.stopped]
        causes += [_cause(member, Failure(Sign.HUNG, "hangs: stopped")) for member in stopped]
        deadline = time.monotonic() + SETTLE_S
        while min(cause.sign for cause in causes) is not Sign.DIED and time.monotonic() < deadline:
            time.sleep(PERIOD_S / 4)
            causes += self._tick(0.0)
        return min(causes, key=lambda cause: cause.sign)

    def _fail(self, cause: Cause) -> None:
        self._cause = cause
        self._failed.set()
        dying = DIES_WITH[cause.role]
        left = _end([member for member in self._members if member.role in dying])
        if left:
            logger.error("still there after %.0f s: %s", END_TIMEOUT_S, ", ".join(left))


def _cause(member: Member, failure: Failure) -> Cause:
    return Cause(failure.sign, member.role, f"{_named(member)} {failure.text}", failure.error)


def _named(member: Member) -> str:
    """Who it is, and the last step it had told of."""
    pid = f", pid {member.process.pid}" if member.process is not None else ""
    step = f", last step {member.last_step}" if member.last_step is not None else ""
    return f"{member.name}{pid}{step}," if pid or step else member.name


def _end(members: Sequence[Member]) -> list[str]:
    for member in members:
        _quietly(member.kill)
    here = {member.process: member.name for member in members if member.process is not None}
    left = wait_gone(here, timeout_s=POLITE_S)
    left = end_processes(left, timeout_s=END_TIMEOUT_S)
    return [f"{here[process]} (pid {process.pid})" for process in left]


def _quietly(kill: Callable[[], None]) -> None:
    # Whatever is wrong with a process that is being ended, the others must be ended too.
    try:
        kill()
    except Exception as error:
        logger.debug("while ending: %r", error)
