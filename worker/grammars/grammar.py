"""From what a user asks of a text to a grammar of llguidance, and whether that can be followed."""

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from lockstep.comm.structured import StructuredOutputs
from lockstep.worker.grammars.limits import parser_limits
from lockstep.worker.grammars.reasons import reason, with_place, without_place
from lockstep.worker.grammars.vocabulary import SINGLE_BYTES

LIBRARY = "llguidance"
# Models that have lost their way write white space for ever, where JSON allows it.
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
# How the model cuts a text into tokens is the model's choice also where the text is forced. The
# last such line of a grammar counts.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_LOOKED_AHEAD = 16


class GrammarError(ValueError):
    """A grammar that cannot be followed; the message names the field that has it, and says why."""


def is_installed() -> bool:
    """Whether the optional library is here."""
    return find_spec(LIBRARY) is not None


def check_grammar(structured: StructuredOutputs) -> None:
    """Compile a grammar over single bytes, and follow it while there is one way to begin.

    What fails there fails over tokens too; only limits of work may be met later.

    Raises:
        GrammarError: names the field of ``structured``, and what is wrong with it.
    """
    from lockstep.worker.grammars.matcher import Matcher

    state = compile_grammar(structured, SINGLE_BYTES.open())
    matcher = Matcher(state, structured.kind, SINGLE_BYTES.size, [])
    if matcher.complete:
        raise GrammarError(f"{structured.kind}: it allows only the empty text")
    for _ in range(_LOOKED_AHEAD):
        bits = int.from_bytes(matcher.mask, "little")
        if bits.bit_count() != 1:
            break
        matcher.take(bits.bit_length() - 1)


def compile_grammar(structured: StructuredOutputs, tokenizer: Any) -> Any:
    """The ``LLMatcher`` of a grammar, before its first token.

    Args:
        tokenizer: an ``LLTokenizer``.

    Raises:
        GrammarError: it is no grammar, or too large.
    """
    from llguidance import LLMatcher

    form, given = structured.kind, getattr(structured, structured.kind)
    try:
        lark = _FORMS[form](given)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{form}: {reason(str(error))}") from None
    limits = parser_limits(form, lark)
    matcher = LLMatcher(tokenizer, lark + _NO_FORCING, log_level=0, limits=limits)
    if matcher.is_error():
        place = with_place if lark == given else without_place
        raise GrammarError(f"{form}: {place(reason(matcher.get_error()))}")
    return matcher


def _schema(schema: dict[str, Any] | str) -> str:
    known = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(known, dict):
        raise ValueError(f"a schema is an object, got {type(known).__name__}")
    options = known.get("x-guidance", {})
    # With both the library does not look at whitespace_flexible.
    if isinstance(options, dict) and "whitespace_flexible" not in options:
        known = known | {"x-guidance": _JSON_OPTIONS | options}
    return f"start: %json {json.dumps(known, allow_nan=False)}"


def _any_object(_: bool) -> str:
    return _schema({"type": "object"})


def _regex(regex: str) -> str:
    from llguidance import LLMatcher

    quoted = json.loads(LLMatcher.grammar_from_regex(regex))
    return str(quoted["grammars"][0]["lark_grammar"])


def _choice(choice: Sequence[str]) -> str:
    texts = (json.dumps(text, ensure_ascii=False) for text in choice)
    # In capitals it is one pattern for the lexer, which has room for far more texts.
    return f"start: TEXT\nTEXT: {' | '.join(texts)}"


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
