"""The ranks of a start without Ray watch those whose processes they can see.

When one dies torchrun ends the others, but srun and a shell do not.
"""

import os
import sys
import threading
import time

from lockstep.launcher.processes import boot_id, on_exit_of
from lockstep.launcher.roll import Presence

LAST_WORDS_S = 5.0


class Siblings:
    """Makes this process end, a little later and with an error, when another rank has ended."""

    def __init__(self, roll: list[Presence], *, rank: int) -> None:
        self._leaving = threading.Event()
        for other, each in enumerate(roll):
            if other != rank and each.boot_id == boot_id():
                self._watch(other, each.pid)

    def leave(self) -> None:
        """From now on ranks end because all is done."""
        self._leaving.set()

    def _watch(self, rank: int, pid: int) -> None:
        try:
            on_exit_of(pid, lambda: self._gone(rank, pid))
        except ProcessLookupError:
            self._gone(rank, pid)

    def _gone(self, rank: int, pid: int) -> None:
        if self._leaving.is_set():
            return
        sys.stderr.write(f"lockstep: rank {rank}, pid {pid}, died\n")
        # A rank that serves sees it too and ends by itself; one that loads or waits does not.
        time.sleep(LAST_WORDS_S)
        sys.stderr.flush()
        os._exit(1)
