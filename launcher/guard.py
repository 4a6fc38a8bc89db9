"""A process that outlives its driver by a moment, to end what the driver leaves behind.

Ray's own daemons can outlive a killed driver by a minute, and a stopped actor by more. Everything
an engine starts therefore carries a mark in its environment; when the driver ends, or asks for it,
the guard kills what carries the mark. Ray's agents write their titles over their environment: they
are known by the log files of their cluster, which they hold open. The guard is started in a session
of its own and imports nothing of ours, so it costs a few megabytes.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

MARK = "LOCKSTEP_ENGINE"
_GRACE_S = 1.0
_GIVE_UP_S = 12.0
# A process that starts a program has no environment for some milliseconds.
_QUIET_S = 0.5
_DIRECTORY_FLAG = b"--session-dir="


class Guard:
    """The driver's handle of its guard."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._directory = ""
        self._process = subprocess.Popen(
            [sys.executable, "-IS", __file__, str(os.getpid()), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def claim(self, directory: str) -> None:
        """Say where the cluster that this driver has started keeps its files; once."""
        self._directory = directory
        assert self._process.stdin is not None
        # A guard that was killed is stood in for when it is needed.
        with suppress(BrokenPipeError):
            self._process.stdin.write(directory.encode())
            self._process.stdin.flush()

    def finish(self) -> bool:
        """Have everything marked ended now. True if nothing is left; safe to call twice."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            code = self._process.wait(timeout=_GRACE_S + _GIVE_UP_S)
        except subprocess.TimeoutExpired:
            return False
        # A guard that was killed itself is stood in for.
        return code == 0 if code in (0, 1) else _end_marked(self.mark, self._directory)


def marked(mark: str, directory: str = "") -> list[int]:
    """Pids of this user's processes whose environment held ``mark`` when they started.

    One that has overwritten its environment counts if it has a file open under ``directory``.
    """
    wanted = f"{MARK}={mark}".encode()
    found = [(pid, _environment(pid)) for pid in _pids()]
    return [
        pid
        for pid, environment in found
        if wanted in environment
        or (directory and environment[:1] == [b""] and _has_open(pid, directory))
    ]


def _pids() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != own]


def _environment(pid: int) -> list[bytes]:
    return _words(pid, "environ")


def _words(pid: int, name: str) -> list[bytes]:
    # Empty for a zombie, and for processes of others.
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _has_open(pid: int, directory: str) -> bool:
    return any(link.startswith(f"{directory}/") for link in _open_files(pid))


def _open_files(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                yield os.readlink(f"{folder}/{name}")


def _directory_of_head(pids: list[int]) -> str:
    """Where a head among them keeps its files: its driver may have ended before it could claim.

    Only who starts a cluster has a head that is marked.
    """
    for pid in pids:
        program, *arguments = _words(pid, "cmdline") or [b""]
        if program.endswith(b"/gcs_server"):
            found = [each for each in arguments if each.startswith(_DIRECTORY_FLAG)]
            return found[0].removeprefix(_DIRECTORY_FLAG).decode() if found else ""
    return ""


def _end_marked(mark: str, directory: str = "") -> bool:
    """Let them end by themselves for a moment, then kill until none has been seen for a while."""
    start = time.monotonic()
    seen = start - _QUIET_S
    while True:
        left, now = marked(mark, directory), time.monotonic()
        directory = directory or _directory_of_head(left)
        if not left and now - seen >= _QUIET_S:
            return True
        if now - start > _GIVE_UP_S:
            return not left
        if left:
            seen = now
        if now - start > _GRACE_S:
            for pid in left:
                _kill(pid)
        time.sleep(0.1)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass


def _main(driver: int, mark: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return 0 if _end_marked(mark, _told_until_the_end_of(driver)) else 1


def _told_until_the_end_of(driver: int) -> str:
    """What the driver says on standard input, until it closes that or ends."""
    poll, told = select.poll(), b""
    poll.register(0, select.POLLIN | select.POLLHUP)
    try:
        poll.register(os.pidfd_open(driver), select.POLLIN)
    except ProcessLookupError:
        pass
    while 0 in dict(poll.poll()):
        said = os.read(0, 4096)
        if not said:
            break
        told += said
    return told.decode()


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), sys.argv[2]))
