"""Errors of the library, said to a user who knows the grammar and not the library."""

import re

from lockstep.worker.grammars.limits import REGEX_WORK_A_MASK

_APPENDED = re.compile(r"\n *\d+ \| |\n<")
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_INNER_PLACE = re.compile(r" at line \d+ column \d+$")
_SHOWN = 300
_CLEARER = (
    (
        re.compile(r"^NoExtension.*"),
        "no text matches it, or it recurs without end",
    ),
    (
        re.compile(r".*Current row has (\d+) items; max is (\d+).*"),
        r"it is too large or too ambiguous: the text can be read in \1 ways at one place, "
        r"at most \2 are followed",
    ),
    (
        re.compile(r".*Too many items \(limit (\d+);.*"),
        r"it is too large or too ambiguous: more than \1 ways to go on in one step",
    ),
    (
        re.compile(r".*too many expressions constructed.*"),
        f"its regular expressions are too large: more than {REGEX_WORK_A_MASK} units of work "
        "in one step; counts such as {1,100} within one another multiply",
    ),
    (
        re.compile(r"grammar size \(number of symbols\) too big \(limit for this grammar: (\d+)\)"),
        r"it is too large: more than \1 symbols",
    ),
    (
        re.compile(r"Enable 'coerce_one_of' option"),
        'Put "x-guidance": {"coerce_one_of": true} into the schema',
    ),
)


def reason(error: str) -> str:
    """An error in one line, without the source and the state that the library appends."""
    said = " ".join(_APPENDED.split(error, maxsplit=1)[0].split())
    for known, clear in _CLEARER:
        said = known.sub(clear, said)
    return said if len(said) <= _SHOWN else said[:_SHOWN] + "..."


def with_place(reason: str) -> str:
    """A reason whose place is one in the source that the user wrote."""
    return _PLACE.sub(r"line \1, column \2: ", reason)


def without_place(reason: str) -> str:
    """A reason whose place is one in a source that was made here."""
    return _INNER_PLACE.sub("", _PLACE.sub("", reason))
