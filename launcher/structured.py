"""Structured output as users ask for it: in the fields of OpenAI and of vLLM."""

from typing import Any

from lockstep.comm.structured import StructuredOutputs
from lockstep.worker.grammars.grammar import GrammarError, check_grammar, is_installed

FIELD = "structured_outputs"
RESPONSE_FORMAT = "response_format"
_KINDS = ("text", "json_object", "json_schema")


def asks_structure(fields: dict[str, Any]) -> bool:
    """Whether sampling parameters as a user gave them ask for some form, in either field."""
    return fields.get(FIELD) is not None or bool(fields.get(RESPONSE_FORMAT))


def take_response_format(fields: dict[str, Any]) -> str:
    """Put what ``response_format`` asks for into ``structured_outputs``: None if for nothing.

    Returns:
        The field that the user gave, to be named in errors.

    Raises:
        ValueError: it is none that is known, or there are both fields.
    """
    if RESPONSE_FORMAT not in fields:
        return FIELD
    form = _form_of(fields.pop(RESPONSE_FORMAT))
    if form is not None and fields.get(FIELD) is not None:
        raise ValueError(f"{RESPONSE_FORMAT} cannot be combined with {FIELD}")
    if form is not None or FIELD not in fields:
        fields[FIELD] = form
    return RESPONSE_FORMAT


def _form_of(asked: Any) -> dict[str, Any] | None:
    kind = asked.get("type") if isinstance(asked, dict) else asked
    if kind not in _KINDS:
        raise ValueError(f"{RESPONSE_FORMAT}.type must be one of {', '.join(_KINDS)}, got {kind!r}")
    if kind == "json_schema":
        named = asked.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(schema, dict):
            field = f"{RESPONSE_FORMAT}.json_schema.schema"
            raise ValueError(f"{field} must be an object, got {schema!r}")
        return {"json": schema}
    return None if kind == "text" else {"json_object": True}


class StructureCheck:
    """Refuses what cannot be followed, before a request enters the engine.

    What was accepted last is remembered: a call may ask the same of many prompts.

    Args:
        has_tokens: whether the model's tokens are known.
    """

    def __init__(self, *, has_tokens: bool) -> None:
        self._has_tokens = has_tokens
        self._accepted: StructuredOutputs | None = None

    def check(self, field: str, structured: StructuredOutputs) -> None:
        """Raises ValueError that begins with ``field``."""
        if structured == self._accepted:
            return
        if not is_installed():
            extra = "pip install 'lockstep-decode[structured]'"
            raise ValueError(f"{field} needs the optional package llguidance: {extra}")
        if not self._has_tokens:
            raise ValueError(f"{field}: this model has no tokenizer")
        try:
            check_grammar(structured)
        except GrammarError as error:
            raise ValueError(f"{field}: {error}") from None
        self._accepted = structured
