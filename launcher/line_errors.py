"""Errors of prompts that come a line each begin with the line."""

from collections.abc import Iterable, Iterator

import msgspec

from lockstep.launcher.inputs import BadInput, PromptInput
from lockstep.launcher.session import Progressed


class LineErrors:
    """Remembers the lines of requests under way. Without any, errors stay as they are."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def unnumbered(
        self, lines: Iterable[tuple[int, PromptInput | BadInput]]
    ) -> Iterator[PromptInput | BadInput]:
        """What is on the lines, one a request and in its order."""
        for index, (number, given) in enumerate(lines):
            self._numbers[index] = number
            yield given

    def located(self, events: Iterable[Progressed]) -> Iterator[Progressed]:
        """The same events; errors of those that end begin with ``line N:``."""
        for event in events:
            yield event if event.output is None else self._ended(event)

    def _ended(self, event: Progressed) -> Progressed:
        number = self._numbers.pop(event.index, None)
        if number is None or event.output is None or event.output.error is None:
            return event
        error = f"line {number}: {event.output.error}"
        output = msgspec.structs.replace(event.output, error=error)
        return msgspec.structs.replace(event, output=output)
