"""Prompts as a user gives them: arguments, lines of text, or lines of JSON.

A line that cannot be read becomes a ``BadInput`` in its place; the others go on.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.chat_template import Message
from lockstep.launcher.line_format import Format, LineFormat, filled
from lockstep.launcher.strict import convert, suggestion
from lockstep.launcher.structured import RESPONSE_FORMAT
from lockstep.launcher.text_check import check_text

KINDS = ("prompt", "messages", "prompt_token_ids")


class PromptInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt in one of three forms, and the sampling parameters it sets itself.

    ``template_variables`` go to the chat template beside the messages.

    Raises:
        ValueError: not exactly one form is given, or it is empty.
    """

    prompt: str | None = None
    messages: list[Message] | None = None
    prompt_token_ids: list[int] | None = None
    template_variables: dict[str, Any] = {}
    sampling: dict[str, Any] = {}

    def __post_init__(self) -> None:
        forms = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(forms) != 1:
            raise ValueError(f"exactly one of {', '.join(KINDS)} is needed, got {forms or 'none'}")
        if self.messages is not None:
            _check_messages(self.messages)


class BadInput(msgspec.Struct, frozen=True):
    """A prompt that cannot run, in its place; ``prompt`` is its text if that much was readable."""

    error: str
    prompt: str | None = None


def _untold(text: str) -> None:
    """For formats that are named, of which there is nothing to tell."""


def read_lines(
    lines: Iterable[bytes], format: Format, tell: Callable[[str], None] = _untold
) -> Iterator[tuple[int, PromptInput | BadInput]]:
    """The number and the record of each line that is not blank.

    ``tell`` gets what the user should know of a guess.
    """
    formats = LineFormat(format, tell)
    for number, line in filled(lines):
        try:
            yield number, _parse(line.decode("utf-8"), formats.of(number, line))
        except ValueError as error:
            yield number, BadInput(str(error))


def _parse(line: str, format: Format) -> PromptInput:
    return parse_json(line) if format == "jsonl" else PromptInput(prompt=line)


def parse_json(line: str) -> PromptInput:
    """Read one JSON object.

    Python's reader takes the literal NaN, which JSON has not, so that the checks of the sampling
    parameters can name the field it stands in.

    Raises:
        ValueError: no JSON object, an unknown field, or a wrong type; names it.
    """
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"no valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object is needed, got {type(record).__name__}")
    return from_record(record)


def from_record(record: dict[str, Any]) -> PromptInput:
    """Split an object into its prompt and its sampling parameters.

    Raises:
        ValueError: names the field.
    """
    known = (*KINDS, *SamplingParams.__struct_fields__, RESPONSE_FORMAT)
    for key in record:
        if key not in known:
            raise ValueError(f"unknown field {key!r}{suggestion(key, known)}")
    sampling = {key: value for key, value in record.items() if key not in KINDS}
    forms = {key: record[key] for key in KINDS if key in record}
    return convert({**forms, "sampling": sampling}, PromptInput)


def read_record(record: dict[str, Any]) -> PromptInput | BadInput:
    """As ``from_record``, an error in its place."""
    try:
        return from_record(record)
    except ValueError as error:
        return BadInput(str(error))


def _check_messages(messages: list[Message]) -> None:
    if not messages:
        raise ValueError("messages: at least one message is needed, got []")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{number}].role: text is needed, got {message.get('role')}")
        if not isinstance(message.get("content"), str | list):
            raise ValueError(f"messages[{number}].content: text or a list of text parts is needed")
        for place, text in _texts(message):
            check_text(text, f"messages[{number}].{place}")


def _texts(message: Message) -> Iterator[tuple[str, str]]:
    """What of a message is to be text, by its place there."""
    content = message["content"]
    yield "role", message["role"]
    if isinstance(content, str):
        yield "content", content
        return
    for number, part in enumerate(content):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield f"content[{number}].text", part["text"]
