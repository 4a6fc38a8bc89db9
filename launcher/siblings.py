"""The ranks of a start without Ray watch each other.

When one dies torchrun ends the others, but srun and a shell do not.
"""

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from lockstep.launcher.processes import on_exit_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PIDS = "lockstep/pids"
MEET_S = 300.0
LAST_WORDS_S = 5.0


class Siblings:
    """Makes this process end, a little later and with an error, when another rank has ended."""

    def __init__(self, store: "Store", *, rank: int, world_size: int) -> None:
        from lockstep.comm.rendezvous import exchange

        pids = exchange(
            store, PIDS, str(os.getpid()), rank=rank, ranks=range(world_size), timeout_s=MEET_S
        )
        self._leaving = threading.Event()
        for other, pid in pids.items():
            if other != rank:
                self._watch(other, int(pid))

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
