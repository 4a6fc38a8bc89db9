"""What another process of this host does: it runs, is stopped (SIGSTOP), or is gone."""

import time

# What passes between two looks counts up to this: a pause of the whole machine is nobody's stop.
_LONGEST_LOOK_S = 1.0


def process_gone(pid: int) -> bool:
    """True if ``pid`` has ended, reaped or not. Same pid namespace only."""
    return _state(pid) in (b"", b"Z", b"X")


def process_stopped(pid: int) -> bool:
    """True while ``pid`` is stopped by a signal; one that a debugger holds is not."""
    return _state(pid) == b"T"


class StopClock:
    """How long one process has been stopped without a break, as far as it was looked at."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._stopped_s = 0.0

    def look(self, pid: int) -> float:
        """Seconds; 0 if it is not stopped now. Call it several times a second."""
        now = time.monotonic()
        passed_s, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        self._stopped_s = self._stopped_s + passed_s if process_stopped(pid) else 0.0
        return self._stopped_s


def _state(pid: int) -> bytes:
    """The letter of /proc; nothing if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return b""
    # The name may hold spaces and parentheses: the state stands after the last one.
    return b"".join(stat.rpartition(b")")[2].split()[:1])
