"""Structured output from a call to its text: a tiny model with random weights in this process."""

import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from byte_model import END, VOCAB, byte_tokenizer, write_byte_model
from fake_engine import FakeEngine
from inline_engine import start_inline_engine
from launch_cases import resolved_config
from served import Served, serving
from token_backends import byte_fallback, byte_level
from tokenizers import Tokenizer as Backend

from lockstep.comm.sampling import SamplingParams
from lockstep.comm.structured import StructuredOutputs
from lockstep.launcher import structured
from lockstep.launcher.grammars import create_compiler
from lockstep.launcher.inputs import BadInput, parse_json, read_lines
from lockstep.launcher.llm import LLM
from lockstep.launcher.prepare import Preparer, prepare_all
from lockstep.launcher.tokenize import NoTokenizer, Tokenizer, load_tokenizer
from lockstep.worker.grammars import grammar

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "home": {"$ref": "#/$defs/home"},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {"home": {"enum": ["Rome", "Z\u00fcrich"]}},
    "x-guidance": {"whitespace_flexible": False},
}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
READ_IN_MANY_WAYS = 'a: a a | a a a | a a a a | "x" | "y"'
# More than any of these texts take.
ROOM = {"max_tokens": 90, "temperature": 1.0}


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[Served]:
    settings = {"load_format": "dummy", "enforce_eager": True, "max_num_seqs": 8}
    with serving(model, start_inline_engine, **settings) as served:
        yield served


def say(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], **ROOM, **more}


def test_a_schema_in_openais_form_whole_and_streamed(served: Served) -> None:
    call = say(response_format=AS_PERSON, n=3, seed=5)
    whole = served.ask(CHAT, call).json()["choices"]
    texts = [choice["message"]["content"] for choice in whole]
    assert all(map(is_person, texts)) and len(set(texts)) == 3
    assert {choice["finish_reason"] for choice in whole} == {"stop"}
    streamed = served.ask(CHAT, call | {"stream": True})
    assert ["".join(streamed.texts(index)) for index in range(3)] == texts


@pytest.mark.parametrize(
    ("asked", "is_valid"),
    [
        ({"response_format": AS_PERSON}, is_person),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, is_person),
        (
            {"structured_outputs": {"regex": "[A-Z]{3}-[0-9]{2}"}},
            re.compile("[A-Z]{3}-[0-9]{2}").match,
        ),
        ({"structured_outputs": {"choice": ["ja", "nein", "\u00fc\U0001f600"]}}, len),
        ({"structured_outputs": {"choice": [f"word {n}" for n in range(10_000)]}}, len),
        ({"structured_outputs": {"grammar": 'root ::= "x" ("," [0-9])+ "."'}}, len),
    ],
)
def test_each_form_in_completions(served: Served, asked: dict[str, Any], is_valid: Any) -> None:
    call = {"prompt": ["a", "b"], "logprobs": 2, **ROOM, **asked}
    for choice in served.ask(COMPLETIONS, call).json()["choices"]:
        assert choice["finish_reason"] == "stop" and is_valid(choice["text"])
        if "choice" in asked.get("structured_outputs", {}):
            assert choice["text"] in asked["structured_outputs"]["choice"]


def test_any_object_of_json(served: Served) -> None:
    # Random weights hardly ever close what they have opened.
    biases = {token_of(letter): 20 for letter in '"}'}
    call = say(response_format={"type": "json_object"}, logit_bias=biases, n=4)
    for choice in served.ask(CHAT, call).json()["choices"]:
        assert choice["finish_reason"] == "stop"
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def token_of(letter: str) -> int:
    (token_id,) = byte_tokenizer().encode(letter).ids
    return int(token_id)


def test_stop_strings_and_an_end_that_is_not_followed(served: Served) -> None:
    digits = {"structured_outputs": {"regex": "[0-9]{30}"}, "temperature": 1.0, "max_tokens": 60}
    stopped = served.ask(COMPLETIONS, {"prompt": "x", "stop": list("0123456789"), **digits})
    assert stopped.json()["choices"][0]["text"] == ""
    going_on = served.ask(COMPLETIONS, {"prompt": "x", "ignore_eos": True, **digits}).json()
    assert re.fullmatch("[0-9]{30}", going_on["choices"][0]["text"])
    assert going_on["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": None},
    ],
)
def test_what_asks_for_nothing_changes_nothing(served: Served, asked: dict[str, Any]) -> None:
    call = {"prompt": "x", "temperature": 0, "max_tokens": 5}
    plain, same = (served.ask(COMPLETIONS, call | more).json() for more in ({}, asked))
    assert plain["choices"] == same["choices"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type must be one of"),
        ({"response_format": "json"}, "response_format.type must be one of"),
        ({"response_format": {"type": "json_schema"}}, r"response_format.json_schema.schema must"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            "response_format: json: .*Invalid type: no",
        ),
        (
            {"response_format": AS_PERSON, "structured_outputs": {"regex": "a"}},
            "response_format cannot be combined with structured_outputs",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs: regex: .*unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs: .*one of"),
        ({"structured_outputs": {}}, "structured_outputs: exactly one of .* is needed"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs: exactly one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs: .*at least one text"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs: .*xml"),
        ({"structured_outputs": {"regex": 7}}, "structured_outputs.regex: "),
        ({"structured_outputs": "json"}, "structured_outputs: "),
    ],
)
def test_a_bad_form_is_400_with_its_field_and_harms_nobody(
    served: Served, asked: dict[str, Any], message: str
) -> None:
    for path, call in ((CHAT, say(**asked)), (COMPLETIONS, {"prompt": "x", **asked})):
        refused = served.ask(path, call)
        assert refused.status == 400, refused.body
        error = refused.error()
        assert re.match(message, error["message"]), error["message"]
        assert error["param"] == re.match(r"\w+", error["message"])[0]
    assert served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status == 200


def test_what_meets_a_limit_later_is_the_client_s_mistake_and_harms_nobody(served: Served) -> None:
    others = served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 3, "temperature": 0}).json()
    asked = {"structured_outputs": {"grammar": "start: b a\nb: /[a-z]/\n" + READ_IN_MANY_WAYS}}
    call = say(**asked, ignore_eos=True, max_tokens=300)
    whole = served.ask(CHAT, call)
    assert whole.status == 400
    events = served.ask(CHAT, call | {"stream": True}).events()
    assert len(events) > 2
    for error in (whole.error(), events[-1]["error"]):
        assert (error["type"], error["param"]) == ("invalid_request_error", "structured_outputs")
        assert re.match(
            "structured_outputs: grammar: .* at most 500 are followed", error["message"]
        )
    again = served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 3, "temperature": 0}).json()
    assert again["choices"] == others["choices"]


def test_without_the_library_the_extra_is_named_and_all_else_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "is_installed", lambda: False)
    for field, value in (("response_format", AS_PERSON), ("structured_outputs", {"regex": "no"})):
        error = served.ask(CHAT, say(**{field: value})).error()
        assert (error["code"], error["param"]) == (400, field)
        assert "pip install 'lockstep-decode[structured]'" in error["message"]
    assert served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status == 200


def test_a_grammar_that_takes_long_holds_up_no_other_prompt(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = threading.Event(), threading.Event()
    monkeypatch.setattr(structured, "check_grammar", lambda _: begun.set() or gate.wait(60))
    slow = threading.Thread(
        target=served.ask, args=[CHAT, say(structured_outputs={"regex": "slow"})]
    )
    slow.start()
    assert begun.wait(60)
    assert served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status == 200
    gate.set()
    slow.join(60)


def preparer(tokenizer: Any) -> Preparer:
    return Preparer(tokenizer, vocab_size=VOCAB, end_ids=(END,), defaults={}, max_model_len=512)


def test_lines_of_json_may_ask_and_a_bad_one_stays_in_its_place() -> None:
    lines = [
        {"prompt": "a", "structured_outputs": {"regex": "a+b"}},
        {"prompt": "b", "response_format": {"type": "json_object"}},
        {"prompt": "c", "response_format": {"type": "json_schema"}},
        {"prompt": "d", "structured_outputs": {"regex": "("}},
        {"prompt": "e"},
    ]
    read = read_lines([json.dumps(line).encode() for line in lines], "jsonl")
    inputs = [given for _, given in read]
    tokenizer = Tokenizer(byte_tokenizer(), bos_token=None, template=None)
    first, second, third, fourth, last = prepare_all(preparer(tokenizer), inputs)
    assert first.sampling.structured_outputs == StructuredOutputs(regex="a+b")
    assert second.sampling.structured_outputs == StructuredOutputs(json_object=True)
    assert isinstance(third, BadInput) and third.error.startswith("response_format.json_schema")
    assert isinstance(fourth, BadInput) and fourth.error.startswith("structured_outputs: regex")
    assert last.sampling.structured_outputs is None


def test_a_line_s_own_form_stands_above_that_of_all_lines() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), bos_token=None, template=None)
    defaults = {"structured_outputs": {"regex": "a"}}
    prepare = Preparer(
        tokenizer, vocab_size=VOCAB, end_ids=(END,), defaults=defaults, max_model_len=512
    ).prepare
    for own, expected in (
        ("", StructuredOutputs(regex="a")),
        (', "structured_outputs": {"regex": "b"}', StructuredOutputs(regex="b")),
        (', "response_format": {"type": "json_object"}', StructuredOutputs(json_object=True)),
        (', "response_format": {"type": "text"}', None),
        (', "structured_outputs": null', None),
    ):
        given = parse_json(f'{{"prompt": "x"{own}}}')
        assert prepare(given).sampling.structured_outputs == expected


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["level", "fallback"])
def test_any_walk_is_text_as_the_tokenizer_writes_it(backend: Backend, tmp_path: Path) -> None:
    """Characters of several tokens, and words that bring the space before them."""
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer, size = load_tokenizer(str(tmp_path)), backend.get_vocab_size() + 3
    worker = resolved_config().worker
    model = msgspec.structs.replace(worker.model, vocab_size=size)
    config = msgspec.structs.replace(worker, model=model, tokenizer_path=str(tmp_path))
    compiler, pattern = (
        create_compiler(config),
        "x( hello| world|</s>|[\u00e9\u00fc\U0001f600]){3,9}",
    )
    assert compiler is not None
    texts, used = set(), set()
    for seed in range(30):
        matcher = compiler.start(StructuredOutputs(regex=pattern), [], []).result()
        rng, taken = random.Random(seed), list[int]()
        while not matcher.complete:
            taken.append(rng.choice(ids_in(matcher.mask)))
            matcher.take(taken[-1])
        texts.add(tokenizer.decode(taken))
        used.update(taken)
    assert all(re.fullmatch(pattern, text) for text in texts) and len(texts) > 20
    assert max(used) < size - 3 and not used & tokenizer.special_ids
    words = {backend.token_to_id(f"\u2581{word}") for word in ("hello", "world")} - {None}
    assert words <= used


def ids_in(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token_id for token_id in range(8 * len(mask)) if bits >> token_id & 1]


def test_many_prompts_of_a_call_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def noted(asked: StructuredOutputs) -> None:
        checked.append(asked.kind)
        grammar.check_grammar(asked)

    monkeypatch.setattr(structured, "check_grammar", noted)
    prepare = preparer(Tokenizer(byte_tokenizer(), bos_token=None, template=None)).prepare
    for regex in ("a", "a", "a", "b"):
        line = {"prompt": "x", "structured_outputs": {"regex": regex}}
        prepare(parse_json(json.dumps(line)))
    assert checked == ["regex", "regex"]


def test_a_model_without_a_tokenizer_says_so() -> None:
    line = '{"prompt_token_ids": [1], "structured_outputs": {"regex": "a"}}'
    with pytest.raises(ValueError, match="structured_outputs: this model has no tokenizer"):
        preparer(NoTokenizer()).prepare(parse_json(line))


def test_the_offline_class_hands_it_on(tmp_path: Path) -> None:
    engine, asked = FakeEngine(), StructuredOutputs(choice=("ja", "nein"))
    params = [SamplingParams(structured_outputs=asked), SamplingParams(max_tokens=3)]
    with LLM(write_byte_model(tmp_path), start_engine=engine.start, device="cpu") as llm:
        llm.generate(["x", "y"], params)
        with pytest.raises(ValueError, match="structured_outputs: regex: "):
            llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs(regex="(")))
    assert [add.sampling.structured_outputs for add in engine.added] == [asked, None]
