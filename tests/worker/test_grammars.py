"""Grammars compiled and followed, against jsonschema and re; no model."""

import json
import random
import threading

import pytest
from grammar_cases import (
    CASES,
    END,
    OTHER_SPECIAL,
    PERSON,
    VOCABULARY,
    PatientCompiler,
    allowed_in,
    ambiguous,
    patient_compiler,
    text_of,
)

from lockstep.comm.structured import StructuredOutputs
from lockstep.worker.grammars import compiler as compilers
from lockstep.worker.grammars.grammar import GrammarError, check_grammar
from lockstep.worker.grammars.matcher import Matcher
from lockstep.worker.grammars.vocabulary import Vocabulary

NO_TEXT = "no text matches it, or it recurs without end$"
NESTED = json.loads('{"properties":{"a":' * 80 + "{}" + "}}" * 80)
MANY_ARRAYS = [{"type": "array", "minItems": least} for least in range(200)]
WORDS = [f"word{index}" for index in range(50_000)]
MANY_PROPERTIES = {"type": "object", "properties": dict.fromkeys(WORDS[:200], {})}


@pytest.fixture(scope="module")
def compiler() -> PatientCompiler:
    return patient_compiler()


def matcher_of(
    compiler: PatientCompiler, structured: StructuredOutputs, stops=(END,), named=()
) -> Matcher:
    return compiler.start(structured, stops, named).result()


@pytest.mark.parametrize("case", CASES)
def test_any_walk_through_masks_ends_in_a_text_that_was_asked_for(
    compiler: PatientCompiler, case: str
) -> None:
    structured, is_valid = CASES[case]
    check_grammar(structured)
    texts = set()
    for seed in range(25):
        rng, matcher, taken = random.Random(seed), matcher_of(compiler, structured), []
        while not matcher.complete:
            token = rng.choice(sorted(allowed_in(matcher.mask)))
            if token == END:
                break
            taken.append(token)
            matcher.take(token)
        texts.add(text_of(taken))
    assert all(is_valid(text) for text in texts) and len(texts) > 3, texts


def test_what_no_bit_is_set_for_is_refused_and_all_else_taken(compiler: PatientCompiler) -> None:
    structured, _ = CASES["regex"]
    allowed = allowed_in(matcher_of(compiler, structured).mask)
    assert {chr(32 + token) for token in allowed} == {*"ABCDEFGHIJKLMNOPQRSTUVWXYZ("}
    for token in range(VOCABULARY.size):
        matcher = matcher_of(compiler, structured)
        if token in allowed:
            matcher.take(token)
            continue
        with pytest.raises(GrammarError):
            matcher.take(token)


def test_a_whole_text_may_end_by_the_model_s_tokens_and_never_before(
    compiler: PatientCompiler,
) -> None:
    par = [ord(letter) - 32 for letter in "Par"]
    structured, s, a = StructuredOutputs(choice=("Par", "Pars")), ord("s") - 32, ord("a") - 32

    def after(stops, named=()) -> Matcher:
        matcher = matcher_of(compiler, structured, stops, named)
        for token in par:
            assert not allowed_in(matcher.mask) & {END, OTHER_SPECIAL} and not matcher.complete
            matcher.take(token)
        return matcher

    assert allowed_in(after([END]).mask) == {s, END}
    assert allowed_in(after([END, OTHER_SPECIAL], [OTHER_SPECIAL]).mask) == {s, END, OTHER_SPECIAL}
    assert allowed_in(after([]).mask) == {s}, "with ignore_eos the text goes on"
    assert allowed_in(after([END, a], [a]).mask) == {s, END}, "a token with text is text"
    whole = after([END])
    whole.take(s)
    assert whole.complete and allowed_in(whole.mask) == {END}


def test_an_end_token_with_text_is_never_part_of_the_text() -> None:
    letters = Vocabulary([b"a", b"b", b"c"])
    compiler = PatientCompiler(lambda: letters)
    matcher = matcher_of(compiler, StructuredOutputs(regex="[abc]+"), [2])
    assert allowed_in(matcher.mask) == {0, 1}
    matcher.take(0)
    assert allowed_in(matcher.mask) == {0, 1, 2}


@pytest.mark.parametrize("size", [31, 32, 33, 63, 64])
def test_masks_have_a_bit_for_each_id_of_the_model_and_no_more(size: int) -> None:
    tokens = [bytes([65 + index]) for index in range(26)] + [b""] * (size - 26)
    compiler = PatientCompiler(lambda: Vocabulary(tokens))
    matcher = matcher_of(compiler, StructuredOutputs(regex="[A-Z]*"), [size - 1])
    assert len(matcher.mask) == 4 * -(-size // 32)
    assert allowed_in(matcher.mask) == {*range(26), size - 1}


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"json": {"type": "foo"}}, "json: .*foo"),
        ({"json": "{"}, "json: "),
        ({"json": "[1]"}, "json: "),
        ({"json": {"type": "object", "unevaluatedItems": False}}, "json: .*unevaluatedItems"),
        ({"json": {"$ref": "http://localhost/x"}}, "json: .*http://localhost/x"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "json: "),
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"regex": "(?=a)b"}, "regex: .*look-around"),
        ({"json": {"oneOf": [{}, {}]}}, 'json: .*Put "x-guidance": {"coerce_one_of": true} into'),
        ({"json": NESTED}, "json: .*recursion limit exceeded$"),
        ({"json": {"$ref": "#"}}, f"json: {NO_TEXT}"),
        ({"regex": r"[^\s\S]"}, f"regex: {NO_TEXT}"),
        ({"grammar": "start: start"}, f"grammar: {NO_TEXT}"),
        ({"regex": ""}, "regex: it allows only the empty text"),
        ({"choice": ("",)}, "choice: it allows only the empty text"),
        ({"grammar": "start: x"}, "grammar: line 1, column 8: unknown name"),
        ({"grammar": 'start: "a" |\nfoo: "b" start:'}, "grammar: line 2, column 15: Expected"),
        ({"grammar": "root ::= ("}, "grammar: "),
        ({"grammar": ambiguous(90)}, "grammar: .*it is too large: more than 200 symbols"),
        (
            {"json": {"anyOf": [MANY_PROPERTIES]}},
            "json: .*in [0-9]+ ways at one place, at most 500",
        ),
        ({"json": {"anyOf": MANY_ARRAYS * 9}}, "json: .*it is too large: more than 2500 symbols$"),
        ({"grammar": ""}, "grammar: "),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_field(asked, error: str) -> None:
    with pytest.raises(GrammarError, match=f"(?s)^{error}") as caught:
        check_grammar(StructuredOutputs(**asked))
    assert len(str(caught.value)) < 400


LARGE = {
    "an enum": ({"json": {"enum": WORDS}}, '"word1999"'),
    "a choice": ({"choice": tuple(WORDS[:10_000])}, "word1999"),
    "properties": (
        {"json": {"type": "object", "properties": dict.fromkeys(WORDS[:2000], {"const": 1})}},
        '{"word1998": 1, "word1999": 1',
    ),
}


@pytest.mark.parametrize("case", LARGE)
def test_what_is_large_and_clear_is_within_the_limits(compiler: PatientCompiler, case: str) -> None:
    asked, text = LARGE[case]
    check_grammar(StructuredOutputs(**asked))
    matcher = matcher_of(compiler, StructuredOutputs(**asked))
    for letter in text:
        matcher.take(ord(letter) - 32)


@pytest.mark.parametrize("asked", [{}, {"json_object": False}, {"regex": "a", "choice": ("a",)}])
def test_exactly_one_form_is_asked_for(asked) -> None:
    with pytest.raises(ValueError, match="exactly one of json, regex, choice, grammar, json_obj"):
        StructuredOutputs(**asked)


def test_white_space_in_json_is_free_but_has_an_end(compiler: PatientCompiler) -> None:
    matcher = matcher_of(compiler, StructuredOutputs(json={"type": "array", "items": {"const": 1}}))
    bracket, space, closing = (ord(letter) - 32 for letter in "[ ]")
    matcher.take(bracket)
    for _ in range(64):
        assert {space, closing} <= allowed_in(matcher.mask)
        matcher.take(space)
    assert space not in allowed_in(matcher.mask) and closing in allowed_in(matcher.mask)


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        ({"regex": "((a{1,100}){1,100}){1,50}"}, "regex: .* more than 200000 units of work"),
        ({"grammar": 'start: start start | "a"'}, "grammar: .* at most 500 are followed"),
    ],
)
def test_a_limit_that_is_met_on_the_way_is_named(
    compiler: PatientCompiler, asked: dict[str, str], limit: str
) -> None:
    check_grammar(StructuredOutputs(**asked))
    matcher = matcher_of(compiler, StructuredOutputs(**asked))
    with pytest.raises(GrammarError, match=f"^{limit}"):
        for _ in range(500):
            matcher.take(ord("a") - 32)


@pytest.mark.parametrize(
    ("options", "allowed"), [({"coerce_one_of": True}, 64), ({"whitespace_flexible": False}, 0)]
)
def test_options_in_a_schema_keep_the_limit_of_white_space_unless_they_name_it(
    compiler: PatientCompiler, options: dict[str, bool], allowed: int
) -> None:
    schema = {"type": "array", "items": {"const": 1}, "x-guidance": options}
    matcher = matcher_of(compiler, StructuredOutputs(json=schema))
    bracket, space = (ord(letter) - 32 for letter in "[ ")
    for token in [bracket] + [space] * allowed:
        matcher.take(token)
    assert space not in allowed_in(matcher.mask)


def test_a_grammar_is_compiled_once_and_followed_by_each_for_itself(
    compiler: PatientCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def noted(structured, tokenizer):
        compiled.append(structured.kind)
        return compile_grammar(structured, tokenizer)

    compile_grammar = compilers.compile_grammar
    monkeypatch.setattr(compilers, "compile_grammar", noted)
    structured = StructuredOutputs(json=PERSON | {"title": "once"})
    one, other = (matcher_of(compiler, structured) for _ in range(2))
    brace = ord("{") - 32
    assert allowed_in(one.mask) == allowed_in(other.mask) == {brace}
    one.take(brace)
    assert allowed_in(other.mask) == {brace} and allowed_in(one.mask) != {brace}
    assert compiled == ["json"]
    for index in range(compilers._KEPT):
        matcher_of(compiler, StructuredOutputs(regex=f"a{index}"))
    assert len(compiler._kept) == compilers._KEPT
    matcher_of(compiler, structured)
    assert compiled.count("json") == 2


def test_a_vocabulary_that_cannot_be_read_fails_each_request_and_nothing_else() -> None:
    def load() -> Vocabulary:
        raise ValueError("this model has no tokenizer")

    compiler = PatientCompiler(load)
    for _ in range(2):
        with pytest.raises(ValueError, match="has no tokenizer"):
            matcher_of(compiler, StructuredOutputs(regex="a"))


def test_nothing_is_compiled_in_the_thread_that_asks() -> None:
    gate = threading.Event()

    def load() -> Vocabulary:
        assert gate.wait(10)
        return VOCABULARY

    compiler = compilers.GrammarCompiler(load)
    started = compiler.start(StructuredOutputs(regex="a"), [], [])
    assert not started.done()
    gate.set()
    assert allowed_in(started.result(10).mask) == {ord("a") - 32}
