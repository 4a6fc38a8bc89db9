"""The front end of a torchrun start: a child of rank 0 with the command line and the scheduler.

Started by ``torchrun`` as ``python -m lockstep.launcher.torchrun_front PARENT FD ARGUMENT ...``.
"""

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from lockstep.comm.process import process_stopped
from lockstep.launcher.cli import guarded
from lockstep.launcher.engine import EngineSummary, Progress
from lockstep.launcher.errors import StartError
from lockstep.launcher.front_link import AllReady, Attach, Begin, Stage, decode_link, encode_link
from lockstep.launcher.host_engine import HostEngine
from lockstep.launcher.logs import setup_logging
from lockstep.launcher.processes import die_with_parent
from lockstep.launcher.resolve import Resolved
from lockstep.launcher.scheduler_host import SchedulerHost


class RankLink:
    """Rank 0 as its front end sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def start_engine(self, resolved: Resolved, progress: Progress) -> HostEngine:
        """Have the ranks start, and serve them.

        Raises:
            StartError: rank 0 is gone.
        """
        began = time.monotonic()
        self._send(Begin(resolved.worker, resolved.device))
        told = self._await_ready(progress)
        host = SchedulerHost(resolved.worker, told.ready, seating=told.seating)
        self._send(Attach(host.addresses()))
        seconds = {"workers": time.monotonic() - began}
        summary = EngineSummary(launcher="torchrun", ready=told.ready, launch_seconds=seconds)
        return HostEngine(host, summary)

    def _await_ready(self, progress: Progress) -> AllReady:
        while True:
            try:
                message = decode_link(self._connection.recv())
            except (EOFError, OSError) as error:
                raise StartError("rank 0 ended before all ranks could serve") from error
            if isinstance(message, AllReady):
                return message
            assert isinstance(message, Stage)
            progress(message.stage, message.done, message.total)

    def _send(self, message: Begin | Attach) -> None:
        self._connection.send(encode_link(message))


def main(arguments: list[str]) -> int:
    parent, fd, argv = int(arguments[0]), int(arguments[1]), arguments[2:]
    die_with_parent(parent)
    setup_logging("front end")
    code = guarded(argv, RankLink(Connection(fd)).start_engine)
    if process_stopped(parent):
        # It may be the only rank: nobody else would end it. This process goes with it.
        os.kill(parent, signal.SIGKILL)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
