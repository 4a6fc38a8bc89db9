"""How tables are written: as wide as a terminal is, and unbroken into files and pipes."""

from rich.console import Console

_UNBROKEN = 160


def open_console(*, stderr: bool = False) -> Console:
    """A console on standard output or standard error."""
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=False, width=_UNBROKEN)
