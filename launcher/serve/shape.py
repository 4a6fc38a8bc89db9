"""How a generation is written: one envelope for both APIs, around what each makes of a choice."""

from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from lockstep.launcher.outputs import RequestOutput
from lockstep.launcher.serve.generation import Event, Generation
from lockstep.launcher.serve.usage import Usage, usage_of


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or a chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType = UNSET


class Choices(Protocol):
    """What one API makes of the choices of a call, and what it calls a whole answer and a chunk."""

    whole_name: str
    chunk_name: str

    def openings(self) -> list[msgspec.Struct]:
        """What comes before the first token, each in a chunk of its own."""
        ...

    def part(self, event: Event) -> msgspec.Struct:
        """What an event adds to its choice."""
        ...

    def whole(self, output: RequestOutput) -> msgspec.Struct: ...


class Shape:
    """Writes the answers to one call with ``n`` choices a prompt, in the name of ``model``."""

    def __init__(self, model: str, n: int, choices: Choices) -> None:
        self._model = model
        self._n = n
        self._choices = choices

    def openings(self, generation: Generation) -> list[Envelope]:
        """Chunks before the first token."""
        return [self._chunk(generation, each) for each in self._choices.openings()]

    def chunk(self, generation: Generation, event: Event) -> Envelope:
        return self._chunk(generation, self._choices.part(event))

    def usage_chunk(self, generation: Generation) -> Envelope:
        """The last chunk of a stream whose client wants to know the usage."""
        return self.with_usage(generation, self._chunk(generation))

    def whole(self, generation: Generation) -> Envelope:
        choices = [self._choices.whole(output) for output in generation.outputs()]
        whole = self._envelope(generation, self._choices.whole_name, choices)
        return self.with_usage(generation, whole)

    def with_usage(self, generation: Generation, envelope: Envelope) -> Envelope:
        """It, with how many tokens the call took so far."""
        return msgspec.structs.replace(envelope, usage=usage_of(generation, self._n))

    def _chunk(self, generation: Generation, *choices: msgspec.Struct) -> Envelope:
        return self._envelope(generation, self._choices.chunk_name, list(choices))

    def _envelope(self, generation: Generation, name: str, choices: list[Any]) -> Envelope:
        return Envelope(
            id=generation.id,
            object=name,
            created=generation.created,
            model=self._model,
            choices=choices,
        )
