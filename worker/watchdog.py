"""Says which step hangs. A rank stuck in a collective or a kernel cannot raise by itself."""

import faulthandler
import threading
import time
from collections.abc import Callable


class StepWatchdog:
    """Calls ``on_overdue`` once, from its own thread, if a step takes longer than ``timeout_s``.

    Args:
        on_overdue: gets a sentence that names the step; it should end the process.
    """

    def __init__(self, timeout_s: float, on_overdue: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_overdue = on_overdue
        self._running: dict[int, tuple[float, str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step watchdog", daemon=True)

    def begin(self, step_id: int, what: str) -> None:
        """A step begins; ``what`` says its run mode, size and phase."""
        self._running[step_id] = (time.monotonic(), what)

    def end(self, step_id: int) -> None:
        self._running.pop(step_id, None)

    def __enter__(self) -> "StepWatchdog":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._timeout_s / 4)):
            overdue = self._overdue()
            if overdue is not None:
                faulthandler.dump_traceback(all_threads=True)
                self._on_overdue(overdue)
                return

    def _overdue(self) -> str | None:
        now = time.monotonic()
        for step_id, (began, what) in list(self._running.items()):
            if now - began > self._timeout_s:
                return f"step {step_id} ({what}) is not done after {now - began:.1f} s"
        return None
