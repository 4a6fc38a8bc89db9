"""Whether lines of prompts are text or JSON, where the user leaves it open."""

import codecs
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

Format = Literal["auto", "text", "jsonl"]
AUTO_RULE = (
    "auto: jsonl if the file ends in .jsonl, .json or .ndjson, "
    "or if the first line that is not blank begins with a brace; else text"
)
_ENDINGS = (".jsonl", ".json", ".ndjson")
_GUESSES = {
    "jsonl": "so all lines are read as JSON; --prompts-format text takes them as they are",
    "text": "but all lines are taken as text; --prompts-format jsonl reads them as JSON",
}


def filled(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, numbered from 1, without their ends and a byte order mark."""
    for number, raw in enumerate(lines, start=1):
        line = raw.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")
        if line.strip():
            yield number, line


def by_name(format: Format, source: Path | None) -> Format:
    """``format``, or what the ending of a file says in place of ``auto``."""
    named = format == "auto" and source is not None and source.suffix in _ENDINGS
    return "jsonl" if named else format


def by_first_line(lines: Iterable[bytes]) -> Format:
    """What ``auto`` takes lines for; text if all are blank."""
    return next((_guess(line) for _, line in filled(lines)), "text")


def _guess(line: bytes) -> Format:
    return "jsonl" if line.lstrip().startswith(b"{") else "text"


class LineFormat:
    """The format of one line after the other, ``auto`` settled by the first.

    Args:
        format: that of all lines, or ``auto``.
        tell: gets one line for the user once a line was guessed to be JSON, or looks like it in
            what was guessed to be text.
    """

    def __init__(self, format: Format, tell: Callable[[str], None]) -> None:
        self._format = format
        self._tell = tell
        self._watching = format == "auto"

    def of(self, number: int, line: bytes) -> Format:
        """That of line ``number``, which is not blank; called in order."""
        if self._format == "auto":
            self._format = _guess(line)
        if self._watching and _guess(line) == "jsonl":
            self._watching = False
            self._tell(f"prompts: line {number} begins with a brace, {_GUESSES[self._format]}")
        return self._format
