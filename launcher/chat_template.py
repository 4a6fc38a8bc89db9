"""Messages to prompt text by the model's own jinja template, in a sandbox.

A template comes with a model from anywhere, so it runs where it can read its arguments and nothing
else. What it may call is what Hugging Face templates expect.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]


class ChatTemplate:
    """A compiled template.

    Args:
        source: jinja text.
        special_tokens: names such as ``bos_token`` and their texts.

    Raises:
        ValueError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat_template does not compile: {error}") from None

    def render(self, messages: list[Message], variables: Mapping[str, Any] | None = None) -> str:
        """Prompt text that ends where the assistant begins to speak.

        ``variables`` replace those that templates are given otherwise.

        Raises:
            ValueError: the template refuses the messages or fails on them.
        """
        given: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        given |= self._special_tokens
        try:
            return self._template.render(given | {**(variables or {}), "messages": messages})
        # A template is foreign code: whatever it raises is about this request, not about us.
        except Exception as error:
            raise ValueError(f"messages: the chat template failed: {error}") from None


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; for a prompt it is nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
