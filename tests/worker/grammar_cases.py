"""Grammars over the vocabulary of the tiny model, whose ids are the printable letters of ASCII."""

import json
import re
from collections.abc import Callable
from concurrent.futures import wait

import jsonschema
from rig import TINY

from lockstep.comm.structured import StructuredOutputs
from lockstep.worker.grammars.compiler import GrammarCompiler
from lockstep.worker.grammars.vocabulary import Vocabulary

END, OTHER_SPECIAL = 95, 96
VOCABULARY = Vocabulary(
    [*(bytes([32 + token_id]) for token_id in range(END)), b"</s>", b"<pad>"],
    frozenset({END, OTHER_SPECIAL}),
)
assert VOCABULARY.size == TINY.vocab_size

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PLATE = r"[A-Z]{2}-\d{3}|\(\d+(,\d+){1,2}\)"
CITIES = ("Paris", "Par", "Rome", "New York")
SUM = 'start: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[1-9][0-9]{0,2}/'
ARROW = 'root ::= [a-c] ("->" [a-c])+ "."'


def _is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


# What is asked for, and the oracle that says whether a text is it.
CASES: dict[str, tuple[StructuredOutputs, Callable[[str], object]]] = {
    "json": (StructuredOutputs(json=PERSON), _is_person),
    "json as text": (StructuredOutputs(json=json.dumps(PERSON)), _is_person),
    "regex": (StructuredOutputs(regex=PLATE), re.compile(PLATE).fullmatch),
    "choice": (StructuredOutputs(choice=CITIES), CITIES.__contains__),
    "lark": (
        StructuredOutputs(grammar=SUM),
        re.compile(r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}").fullmatch,
    ),
    "gbnf": (StructuredOutputs(grammar=ARROW), re.compile(r"[a-c](->[a-c])+\.").fullmatch),
}


class PatientCompiler(GrammarCompiler):
    """Everything is compiled when ``start`` returns, so that plans do not depend on the clock."""

    def start(self, *args, **kwargs):
        started = super().start(*args, **kwargs)
        wait([started])
        return started


def patient_compiler() -> PatientCompiler:
    return PatientCompiler(lambda: VOCABULARY)


def text_of(token_ids: list[int]) -> str:
    """Without the end token."""
    return b"".join(VOCABULARY.tokens[each] for each in token_ids if each < END).decode()


def allowed_in(mask: bytes) -> set[int]:
    """Ids whose bit is set."""
    bits = int.from_bytes(mask, "little")
    return {token_id for token_id in range(8 * len(mask)) if bits >> token_id & 1}
