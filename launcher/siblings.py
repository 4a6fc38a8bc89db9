"""The ranks of a start without Ray watch those whose processes they can see.

When one dies torchrun ends the others, but srun and a shell do not. One that is stopped would hold
up the others in a collective, and nobody else would end it.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from lockstep.comm.process import StopClock
from lockstep.launcher.processes import boot_id, on_exit_of
from lockstep.launcher.roll import Presence

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LAST_WORDS_S = 5.0
# By then the front end knows who is stopped.
STOPPED_S = 7.0
_POLL_S = 0.05
_LOOK_S = 0.5
_KEY = "lockstep/left"


class Siblings:
    """Makes this process end, a little later and with an error, when another rank has ended.

    A rank that stays stopped (SIGSTOP) is killed.
    """

    def __init__(self, roll: list[Presence], *, rank: int) -> None:
        self._rank = rank
        self._size = len(roll)
        self._dead: set[int] = set()
        self._leaving = threading.Event()
        for other, each in enumerate(roll):
            if other != rank and each.boot_id == boot_id():
                self._watch(other, each.pid)

    def leave(self) -> None:
        """From now on ranks end because all is done."""
        self._leaving.set()

    def wait_left(self, store: "Store", timeout_s: float) -> None:
        """Return once every other rank is here too, or has died, or after ``timeout_s``."""
        store.set(f"{_KEY}/{self._rank}", "")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._all_left(store):
            time.sleep(_POLL_S)

    def _all_left(self, store: "Store") -> bool:
        living = set(range(self._size)) - self._dead
        return all(store.check([f"{_KEY}/{rank}"]) for rank in living)

    def _watch(self, rank: int, pid: int) -> None:
        try:
            on_exit_of(pid, lambda: self._gone(rank, pid))
        except ProcessLookupError:
            self._gone(rank, pid)
            return
        watch = threading.Thread(target=self._end_if_stopped, args=(rank, pid), daemon=True)
        watch.start()

    def _end_if_stopped(self, rank: int, pid: int) -> None:
        # The front end dies with rank 0, and has to tell its clients first.
        limit_s = STOPPED_S if rank else STOPPED_S + LAST_WORDS_S
        clock = StopClock()
        while rank not in self._dead:
            time.sleep(_LOOK_S)
            if clock.look(pid) > limit_s:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return

    def _gone(self, rank: int, pid: int) -> None:
        self._dead.add(rank)
        if self._leaving.is_set():
            return
        sys.stderr.write(f"lockstep: rank {rank}, pid {pid}, died\n")
        # A rank that serves sees it too and ends by itself; one that loads or waits does not.
        time.sleep(LAST_WORDS_S)
        sys.stderr.flush()
        os._exit(1)
