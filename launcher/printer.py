"""Answers on standard output, in input order, the first unfinished one as it grows."""

from typing import TextIO

from lockstep.launcher.session import Progressed


class AnswerPrinter:
    """Streams answers to a person.

    Args:
        stream: where answers go.
        errors: where the reason of a failed request goes.
        headings: name the prompt above each answer; wanted unless there is only one.
    """

    def __init__(self, stream: TextIO, errors: TextIO, *, headings: bool) -> None:
        self._stream = stream
        self._errors = errors
        self._headings = headings
        self._head = 0
        self._begun = False
        self._said = False
        self._later: dict[int, list[Progressed]] = {}

    def show(self, event: Progressed) -> None:
        """Write it if its turn has come, with everything that waited for it."""
        if event.index != self._head:
            self._later.setdefault(event.index, []).append(event)
            return
        waiting = [event]
        while waiting:
            for one in waiting:
                self._write(one)
            waiting = self._later.pop(self._head, [])

    def _write(self, event: Progressed) -> None:
        if self._headings and not self._begun:
            self._stream.write(f"> {event.prompt or f'request {event.index}'}\n")
        self._begun = True
        self._stream.write(event.text)
        self._said |= bool(event.text)
        if event.output is not None:
            self._end(event.index, event.output.error)
        self._stream.flush()

    def _end(self, index: int, error: str | None) -> None:
        if error is None:
            self._stream.write("\n")
        else:
            self._fail(index, error)
        if self._headings:
            self._stream.write("\n")
        self._head += 1
        self._begun = self._said = False

    def _fail(self, index: int, error: str) -> None:
        """End what was said of it; an empty line would be an empty answer."""
        if self._said:
            self._stream.write("\n")
        if self._headings:
            self._stream.write("! failed\n")
        self._stream.flush()
        self._errors.write(f"lockstep: request {index} failed: {error}\n")
