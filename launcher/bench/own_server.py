"""A ``lockstep serve`` of our own, for as long as a run takes."""

import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread

from lockstep.launcher.errors import LaunchError

_LISTENING = re.compile(r"listening on (\S+)")
_READY = re.compile(r"is ready$")
_SHUTDOWN_S = 90.0


@contextmanager
def own_server(label: str, argv: Sequence[str]) -> Iterator[str]:
    """Yields the URL of a server that is ready; what it says goes to standard error.

    Raises:
        LaunchError: it ended before it was ready.
    """
    command = [sys.executable, "-P", "-m", "lockstep", "serve", *argv]
    command += ["--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        lines = _echo(process, label)
        try:
            url = _wait_ready(lines)
            if url is None:
                code = process.wait()
                raise LaunchError(f"the {label} server ended with code {code} before it was ready")
            Thread(target=deque, args=(lines, 0), daemon=True).start()
            yield url
        finally:
            _stop(process)


def _echo(process: subprocess.Popen[str], label: str) -> Iterator[str]:
    assert process.stderr is not None
    for line in process.stderr:
        sys.stderr.write(f"[{label}] {line}")
        yield line.rstrip()


def _wait_ready(lines: Iterator[str]) -> str | None:
    """The URL, once the server takes requests; None if it ended first."""
    url = None
    for line in lines:
        if found := _LISTENING.search(line):
            url = found[1]
        if _READY.search(line):
            return url
    return None


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_SHUTDOWN_S)
    except subprocess.TimeoutExpired:
        process.kill()
