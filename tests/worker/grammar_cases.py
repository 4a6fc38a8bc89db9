"""Grammars over the vocabulary of the tiny model, whose ids are the printable letters of ASCII."""

import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import wait

from inline import request
from rig import TINY

from lockstep.comm.messages import AddRequest
from lockstep.comm.structured import StructuredOutputs
from lockstep.worker.grammars.compiler import GrammarCompiler
from lockstep.worker.grammars.vocabulary import Vocabulary

END, OTHER_SPECIAL = 95, 96


def vocabulary_of(size: int) -> Vocabulary:
    """Ids behind those of the tiny model have no text."""
    letters = [bytes([32 + token_id]) for token_id in range(END)]
    tokens = [*letters, b"</s>", b"<pad>"]
    return Vocabulary(tokens + [b""] * (size - len(tokens)), frozenset({END, OTHER_SPECIAL}))


VOCABULARY = vocabulary_of(TINY.vocab_size)

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
# Not \d, which knows digits of a later Unicode in the library than in Python.
PLATE = r"[A-Z]{2}-[0-9]{3}|\([0-9]+(,[0-9]+){1,2}\)"
CITIES = ("Paris", "Par", "Rome", "New York")
SUM = 'start: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[1-9][0-9]{0,2}/'
ARROW = 'root ::= [a-c] ("->" [a-c])+ "."'


def ambiguous(rules: int) -> str:
    """A grammar of texts "aaa...", which can be read in ever more ways."""
    names = [f"r{index}" for index in range(rules)]
    heads = zip(names, names[1:] + names[:1], strict=True)
    return "\n".join(
        [f"start: {' | '.join(names)}", *(f'{name}: start {other} | "a"' for name, other in heads)]
    )


def _is_person(text: str) -> bool:
    import jsonschema

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


def patient_compiler(vocab_size: int = TINY.vocab_size) -> PatientCompiler:
    return PatientCompiler(lambda: vocabulary_of(vocab_size))


def asking(name: str, structured: StructuredOutputs, **more: object) -> AddRequest:
    """A request whose text shall have that form; no case needs more tokens."""
    options = {"max_tokens": 55, "temperature": 1.0, "stop_ids": [END]} | more
    return request(
        name, [5, 17, 3, 8, 20, 21, 22, 23, 24], structured_outputs=structured, **options
    )


def constrained(seeds: Iterable[int]) -> list[AddRequest]:
    """Every case with every seed."""
    return [
        asking(f"{case} {seed}", structured, seed=seed)
        for case, (structured, _) in CASES.items()
        for seed in seeds
    ]


def check_texts(tokens: dict[str, list[int]], seeds: Iterable[int]) -> set[str]:
    """Assert that requests of ``constrained`` gave what they asked for; all their texts."""
    texts = set()
    for case, (_, is_valid) in CASES.items():
        found = {text_of(tokens[f"{case} {seed}"]) for seed in seeds}
        assert all(is_valid(text) for text in found), found
        texts |= found
    return texts


def text_of(token_ids: list[int]) -> str:
    """Without the end token."""
    return b"".join(VOCABULARY.tokens[each] for each in token_ids if each < END).decode()


def allowed_in(mask: bytes) -> set[int]:
    """Ids whose bit is set."""
    bits = int.from_bytes(mask, "little")
    return {token_id for token_id in range(8 * len(mask)) if bits >> token_id & 1}
