"""A rank in a child process of this one: the process, and its parent's hold on it."""

import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

from lockstep.comm.messages import DeviceTimes
from lockstep.launcher.errors import EngineDead, StartError
from lockstep.launcher.front_link import Stage
from lockstep.launcher.placement import LOOPBACK
from lockstep.launcher.processes import die_with_parent
from lockstep.launcher.rank_host import RankHost
from lockstep.worker.config import WorkerConfig

# A fresh interpreter: CUDA does not survive a fork.
_context = multiprocessing.get_context("spawn")
_END_S = 10.0
_REPLY_S = 30.0


# Producer: a child rank. Consumer: its parent.
class Failed(msgspec.Struct, frozen=True):
    """Why the rank cannot start."""

    error: str


class ChildRank:
    """Started here; dies with this process. Messages in order: port (rank 0), ready, times."""

    def __init__(self, rank: int, config: WorkerConfig) -> None:
        self.rank = rank
        self.connection, theirs = _context.Pipe()
        self._process = _context.Process(
            target=run_rank, args=(theirs, os.getpid(), rank, config), name=f"rank {rank}"
        )
        self._process.start()
        theirs.close()

    def tell(self, message: object) -> None:
        """Send it a message, which is lost if it has ended."""
        with suppress(OSError):
            self.connection.send(message)

    def hear(self) -> object:
        """Its next message.

        Raises:
            StartError: it has failed, or has ended without a word.
        """
        try:
            message = self.connection.recv()
        except (EOFError, OSError) as error:
            raise StartError(f"rank {self.rank} ended before it could serve") from error
        if isinstance(message, Failed):
            raise StartError(f"rank {self.rank} failed: {message.error}")
        return message

    def device_times(self) -> DeviceTimes:
        """See ``TimedEngine.device_times``. Raises EngineDead if it does not answer."""
        self.tell(DeviceTimes)
        if not self.connection.poll(_REPLY_S):
            raise EngineDead(f"rank {self.rank} does not tell when its steps ran")
        times = self.hear()
        assert isinstance(times, DeviceTimes)
        return times

    def end(self) -> None:
        """Wait until it has ended, by force after a while."""
        self.connection.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def run_rank(connection: Connection, parent: int, rank: int, config: WorkerConfig) -> None:
    """The child's life. Ends the process with 1 if it fails."""
    die_with_parent(parent)
    # An interrupt is sent to everybody; the parent answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def tell_stage(stage: str, done: int, total: int) -> None:
        connection.send(Stage(stage, done, total))

    host = RankHost(config, on_progress=tell_stage)
    try:
        if rank == 0:
            connection.send(host.serve_store(LOOPBACK))
        connection.send(host.start(connection.recv()))
        channels = connection.recv()
    except EOFError:
        return
    except Exception as error:
        connection.send(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)
    threading.Thread(target=_answer, args=(connection, host), name="answers", daemon=True).start()
    try:
        host.run(channels)
    except Exception:
        # It is logged, and the scheduler has been told.
        sys.exit(1)


def _answer(connection: Connection, host: RankHost) -> None:
    """Tell the times whenever the parent asks, until it leaves."""
    with suppress(EOFError, OSError):
        while connection.recv() is DeviceTimes:
            connection.send(host.device_times())
