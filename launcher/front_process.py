"""The front end's process as its parent, rank 0 of a torchrun start, holds it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe

from lockstep.comm.process import process_stopped
from lockstep.launcher.errors import EngineDead
from lockstep.launcher.front_link import LinkMessage, Stage, decode_link, encode_link
from lockstep.launcher.rank_env import RANK_VARIABLES

_MODULE = "lockstep.launcher.torchrun_front"
_LAST_WORDS_S = 10.0


class FrontProcess:
    """Started here, with this process's standard streams; dies with this process."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(os.getpid()), str(theirs.fileno()), *argv],
            pass_fds=[theirs.fileno()],
            env=_without_rank(os.environ),
        )
        theirs.close()
        self._fatal = False
        threading.Thread(target=self._watch, name="front end", daemon=True).start()

    def hear(self) -> LinkMessage | None:
        """Its next message; None if it has ended."""
        try:
            return decode_link(self._connection.recv())
        except (EOFError, OSError):
            return None

    def tell(self, message: LinkMessage) -> None:
        """Send it a message, which is lost if it has ended."""
        with suppress(OSError):
            self._connection.send(encode_link(message))

    def progress(self, stage: str, done: int, total: int) -> None:
        """Show how far this rank is; an ``engine.Progress``."""
        self.tell(Stage(stage, done, total))

    @contextmanager
    def fatal(self) -> Iterator[None]:
        """Meanwhile the front end's end ends this process, which nothing else would tell."""
        self._fatal = True
        if self._process.poll() is not None:
            os._exit(self.exit_code() or 1)
        try:
            yield
        finally:
            self._fatal = False

    def exit_code(self) -> int:
        """How it ended, or that of ``EngineDead`` if it does not; it may say its last words."""
        self._connection.close()
        patience_s = 0.0 if process_stopped(self._process.pid) else _LAST_WORDS_S
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._tell("hangs")
            return EngineDead.exit_code
        self._tell_of_signal(code)
        return _status(code)

    def terminate(self) -> None:
        """Ask it to end in its own way."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _watch(self) -> None:
        code = self._process.wait()
        if self._fatal:
            self._tell_of_signal(code)
            os._exit(_status(code) or 1)

    def _tell_of_signal(self, code: int) -> None:
        # Whatever else ended it, it has told that itself.
        if code < 0:
            self._tell(f"died: {signal.Signals(-code).name}")

    def _tell(self, what: str) -> None:
        sys.stderr.write(f"lockstep: the front end, pid {self._process.pid}, {what}\n")


def _status(code: int) -> int:
    """A shell's number of an exit: 128 + N after signal N."""
    return 128 - code if code < 0 else code


def _without_rank(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in RANK_VARIABLES}
