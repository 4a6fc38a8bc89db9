"""From what a user asks of a text to a grammar of llguidance, and whether that can be followed."""

import json
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from lockstep.comm.structured import StructuredOutputs
from lockstep.worker.grammars.vocabulary import SINGLE_BYTES

LIBRARY = "llguidance"
# Models that have lost their way write white space for ever, where JSON allows it.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
# How the model cuts a text into tokens is the model's choice also where the text is forced. The
# last such line of a grammar counts.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_APPENDED = re.compile(r"\n *\d+ \| |\n<state>")
_SHOWN = 300


class GrammarError(ValueError):
    """A grammar that cannot be followed; the message says why."""


def is_installed() -> bool:
    """Whether the optional library is here."""
    return find_spec(LIBRARY) is not None


def check_grammar(structured: StructuredOutputs) -> None:
    """Compile a grammar over single bytes, for which it fails wherever it would over tokens.

    Raises:
        GrammarError: names the field of ``structured``, and what is wrong with it.
    """
    from lockstep.worker.grammars.matcher import Matcher

    try:
        matcher = Matcher(compile_grammar(structured, SINGLE_BYTES.open()), SINGLE_BYTES.size, [])
    except GrammarError as error:
        # Of all but a grammar the user does not know the source that has these lines.
        said = str(error) if structured.grammar else _PLACE.sub("", str(error))
        raise GrammarError(f"{structured.kind}: {said}") from None
    if matcher.complete:
        raise GrammarError(f"{structured.kind}: it allows no text")


def compile_grammar(structured: StructuredOutputs, tokenizer: Any) -> Any:
    """The ``LLMatcher`` of a grammar, before its first token.

    Args:
        tokenizer: an ``LLTokenizer``.

    Raises:
        GrammarError: it is no grammar, or too large.
    """
    from llguidance import LLMatcher

    try:
        lark = _FORMS[structured.kind](getattr(structured, structured.kind))
    except (ValueError, RecursionError) as error:
        raise GrammarError(short(str(error))) from None
    matcher = LLMatcher(tokenizer, lark + _NO_FORCING, log_level=0)
    if matcher.is_error():
        raise GrammarError(short(matcher.get_error()))
    return matcher


def short(error: str) -> str:
    """An error of the library in one line, without the source and the state that it appends."""
    said = " ".join(_APPENDED.split(error, maxsplit=1)[0].split())
    return said if len(said) <= _SHOWN else said[:_SHOWN] + "..."


def _schema(schema: dict[str, Any] | str) -> str:
    known = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(known, dict):
        raise ValueError(f"a schema is an object, got {type(known).__name__}")
    return f"start: %json {json.dumps({'x-guidance': _JSON_OPTIONS} | known, allow_nan=False)}"


def _any_object(_: bool) -> str:
    return _schema({"type": "object"})


def _regex(regex: str) -> str:
    from llguidance import LLMatcher

    quoted = json.loads(LLMatcher.grammar_from_regex(regex))
    return str(quoted["grammars"][0]["lark_grammar"])


def _choice(choice: Sequence[str]) -> str:
    texts = (json.dumps(text, ensure_ascii=False) for text in choice)
    return f"start: {' | '.join(texts)}"


def _grammar(grammar: str) -> str:
    from llguidance import grammar_from

    return grammar_from("grammar", grammar)


# Each gives Lark.
_FORMS: dict[str, Callable[[Any], str]] = {
    "json": _schema,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
