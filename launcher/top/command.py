"""``lockstep top URL``: what a server does, as it does it."""

import argparse
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import RenderableType
from rich.live import Live

from lockstep.launcher.arguments import Parser
from lockstep.launcher.consoles import open_console
from lockstep.launcher.errors import ConfigError, LaunchError
from lockstep.launcher.top.scrape import Scrape, scrape, start_of
from lockstep.launcher.top.view import show

SUMMARY = "watch a server: requests, tokens, KV use, latencies, run modes"
_WINDOW_S = 30.0


def main(argv: Sequence[str]) -> int:
    """Raises LaunchError: nobody answers at the address."""
    options = _parse(argv)
    if options.once:
        now = scrape(options.url)
        open_console().print(show(start_of(now), now))
        return 0
    _watch(options.url, options.interval)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="lockstep top", description=SUMMARY, allow_abbrev=False)
    parser.add_argument("url", metavar="URL", nargs="?", default="http://localhost:8000")
    parser.add_argument("--once", action="store_true", help="print once, since the server's start")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default 1)"
    )
    options = parser.parse_args(argv)
    if not options.interval > 0:
        raise ConfigError(f"--interval must be above 0, got {options.interval:g}")
    return options


def _watch(url: str, interval_s: float) -> None:
    """Until interrupted; a server that does not answer for a while is waited for."""
    recent = deque([scrape(url)])
    with _live(show(start_of(recent[0]), recent[0])) as live:
        while True:
            time.sleep(interval_s)
            live.update(_look(url, recent), refresh=True)


@contextmanager
def _live(first: RenderableType) -> Iterator[Live]:
    """A view that ends with its last line, also where it is not a terminal's."""
    console = open_console()
    try:
        with Live(first, console=console, auto_refresh=False) as live:
            yield live
    finally:
        if not console.is_terminal:
            console.line()


def _look(url: str, recent: deque[Scrape]) -> RenderableType:
    """The last half minute up to now; ``recent`` keeps what is needed for the next look."""
    try:
        recent.append(scrape(url))
    except LaunchError as error:
        return f"no answer: {error}"
    while len(recent) > 2 and recent[1].at <= recent[-1].at - _WINDOW_S:
        recent.popleft()
    return show(recent[0], recent[-1])
