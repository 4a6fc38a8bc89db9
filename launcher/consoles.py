"""How tables are written: as wide as a terminal is, and unbroken into files and pipes."""

import sys
from io import TextIOWrapper
from typing import NoReturn

from rich.console import Console

_UNBROKEN = 160


class _Pipe(Console):
    def on_broken_pipe(self) -> NoReturn:
        """A reader that has left is the command's to answer, not an exit from in here."""
        raise BrokenPipeError


def open_console(*, stderr: bool = False) -> Console:
    """A console on standard output or standard error."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal of another encoding gets question marks for bars.
        sys.stdout.reconfigure(errors="replace")
    console = _Pipe(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    return _Pipe(stderr=stderr, highlight=False, width=_UNBROKEN)
