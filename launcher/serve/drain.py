"""The way from a signal to the end, as the log of a server tells it."""

from collections.abc import Callable

from lockstep.launcher.serve.admission import Admission
from lockstep.launcher.serve.stopping import Stopping


class Drain:
    """Says when a server may end, and tells once what it waits for and once what came of that.

    Args:
        stopping: whether a signal came, and how long running requests may take.
        admission: knows how many there are.
        say: writes a line to the log.
    """

    def __init__(
        self, stopping: Stopping, admission: Admission, say: Callable[[str], None]
    ) -> None:
        self._stopping = stopping
        self._admission = admission
        self._say = say
        self._ended_before: int | None = None

    def over(self) -> bool:
        """True once a signal came and nothing runs any more, or the time for that is over."""
        stopping = self._stopping
        if not stopping.asked:
            return False
        if self._ended_before is None:
            self._ended_before = self._admission.num_ended
            self._tell_begin()
        if self._admission.in_flight and not stopping.overdue:
            return False
        self._tell_end(self._admission.num_ended - self._ended_before)
        return True

    def _tell_begin(self) -> None:
        running, limit = self._admission.in_flight, self._stopping.timeout_s
        self._say(
            f"{self._stopping.signal_name}: no more requests are taken; "
            f"{running} may finish within {limit:g} s"
        )

    def _tell_end(self, num_ended: int) -> None:
        left = self._admission.in_flight
        cause = "a second signal" if self._stopping.hurried else "the timeout"
        aborted = f", {left} aborted at {cause}" if left else ""
        self._say(f"drained in {self._stopping.waited_s:.1f} s: {num_ended} ended{aborted}")
