"""Plain data (TOML, JSON, flags) into structs, with errors that name field, value and limit."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
_SHOWN = 80
_LOCATED = re.compile(
    r"(?P<what>.*) - at (?:`key` in )?`\$\.(?P<field>\w+)(?P<rest>.*)`", re.DOTALL
)


def convert(data: dict[str, Any], into: type[T]) -> T:
    """Build ``into`` from ``data``; types must match exactly (an int may stand for a float).

    Raises:
        ValueError: an unknown key, a wrong type, or a value out of range; names field and value.
    """
    fields = into.__struct_encode_fields__
    for key in data:
        if key not in fields:
            raise ValueError(f"unknown field {key!r}{suggestion(key, fields)}")
    try:
        return msgspec.convert(data, into, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(_explain(str(error), data)) from None


def suggestion(key: str, known: Sequence[str]) -> str:
    """The end of an error about an unknown name: the one that was meant, or all there are."""
    close = get_close_matches(str(key), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _explain(message: str, data: dict[str, Any]) -> str:
    found = _LOCATED.fullmatch(message)
    if found is None:
        return message
    field = found["field"]
    value = repr(data.get(field))
    shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
    what = found["what"][0].lower() + found["what"][1:]
    return f"{field}{found['rest']}: {what}; the value is {shown}"
