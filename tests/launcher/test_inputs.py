"""Lines of prompts, and faults 77 and 78: what is no number does not pass for one."""

import json
import re
from typing import Any

import pytest
from byte_model import VOCAB, byte_tokenizer

from lockstep.launcher.chat_template import ChatTemplate
from lockstep.launcher.inputs import BadInput, PromptInput, parse_json, read_lines
from lockstep.launcher.line_format import Format
from lockstep.launcher.prepare import Preparer
from lockstep.launcher.tokenize import Tokenizer

MAX_MODEL_LEN = 512


def read(text: str, format: Format = "jsonl") -> list[PromptInput | BadInput]:
    return [given for _, given in read_lines(text.encode().split(b"\n"), format)]


@pytest.fixture(scope="module")
def preparer() -> Preparer:
    tokenizer = Tokenizer(byte_tokenizer(), bos_token=None, template=None)
    return Preparer(
        tokenizer,
        vocab_size=VOCAB,
        end_ids=(257,),
        defaults={"temperature": 0.5},
        max_model_len=MAX_MODEL_LEN,
    )


def test_a_text_that_no_tokens_could_hold_is_not_even_tokenized(preparer: Preparer) -> None:
    most = 4 * MAX_MODEL_LEN * len("</s>")
    assert len(preparer.prepare(PromptInput(prompt="x" * most)).prompt_ids) == most
    with pytest.raises(ValueError, match=f"at most {most} characters, .* got {most + 1}"):
        preparer.prepare(PromptInput(prompt="x" * (most + 1)))


def test_three_forms_with_sampling_parameters() -> None:
    lines = [
        {"prompt": "hi", "temperature": 0, "stop": "x"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt_token_ids": [1, 2], "max_tokens": 3},
    ]
    text, chat, ids = read("\n".join(map(json.dumps, lines)))
    assert text == PromptInput(prompt="hi", sampling={"temperature": 0, "stop": "x"})
    assert chat == PromptInput(messages=[{"role": "user", "content": "hi"}])
    assert ids == PromptInput(prompt_token_ids=[1, 2], sampling={"max_tokens": 3})


def test_text_lines_keep_braces_and_blank_lines_do_not_count() -> None:
    assert read("\ufeffone\r\n\n {two} \n", "text") == [
        PromptInput(prompt="one"),
        PromptInput(prompt=" {two} "),
    ]


def test_auto_goes_by_the_first_line() -> None:
    assert read('\ufeff {"prompt": "a"}\nb', "auto")[0] == PromptInput(prompt="a")
    assert isinstance(read('{"prompt": "a"}\nb', "auto")[1], BadInput)
    assert read('b\n{"prompt": "a"}', "auto")[1] == PromptInput(prompt='{"prompt": "a"}')


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[1]", "a JSON object is needed, got list"),
        ("{", "no valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", "exactly one of prompt, messages, prompt_token_ids is needed, got none"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "exactly one"),
        ('{"prompt": 7}', "prompt: expected `str | null`, got `int`; the value is 7"),
        ('{"prompt": "a", "temprature": 1}', "did you mean 'temperature'"),
        ('{"messages": []}', "messages: at least one message"),
        ('{"messages": ["a"]}', r"messages\[0\]: expected `object`, got `str`"),
        ('{"messages": [{"content": "a"}]}', r"messages\[0\].role"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\].content"),
        ('{"prompt_token_ids": [1, true]}', r"prompt_token_ids\[1\]: expected `int`, got `bool`"),
        ('{"prompt_token_ids": [1.5]}', r"prompt_token_ids\[0\]: expected `int`, got `float`"),
        ('{"prompt_token_ids": ["7"]}', r"prompt_token_ids\[0\]: expected `int`, got `str`"),
        ('{"prompt_token_ids": 7}', "prompt_token_ids: expected `array | null`, got `int`"),
    ],
)
def test_a_bad_line_is_named(line: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_json(line)


def test_a_bad_line_keeps_its_place_and_the_rest_go_on() -> None:
    lines = [b'{"prompt": "a"}', b"\xff", b'{"prompt": "b"}']
    (one, first), (two, bad), (three, last) = read_lines(lines, "jsonl")
    assert (first, last) == (PromptInput(prompt="a"), PromptInput(prompt="b"))
    assert isinstance(bad, BadInput)
    assert (one, two, three) == (1, 2, 3)


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**31, 2**63])
def test_fault_77_ids_outside_the_vocabulary(preparer: Preparer, token_id: int) -> None:
    given = parse_json(json.dumps({"prompt_token_ids": [1, token_id]}))
    with pytest.raises(ValueError, match=rf"prompt_token_ids\[1\] must be in \[0, {VOCAB}\)"):
        preparer.prepare(given)


NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
BAD = ("NaN", "Infinity", "-Infinity", '"nan"', "1e308", "-3", "null", "[]", "true", "1e999")


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("field", [*NUMBERS, "top_k"])
def test_fault_78_sampling_values(preparer: Preparer, field: str, value: str) -> None:
    given = parse_json(f'{{"prompt": "a", "{field}": {value}}}')
    with pytest.raises(ValueError, match=f"^{field}"):
        preparer.prepare(given)


@pytest.mark.parametrize("value", BAD)
def test_fault_78_logit_bias(preparer: Preparer, value: str) -> None:
    if value == "-3":
        value = "-300"
    given = parse_json(f'{{"prompt": "a", "logit_bias": {{"1": {value}}}}}')
    with pytest.raises(ValueError, match="^logit_bias"):
        preparer.prepare(given)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", "1.0"),
        ("seed", str(2**63)),
        ("max_tokens", "0"),
        ("max_tokens", '"5"'),
        ("min_tokens", "17"),
        ("ignore_eos", "1"),
        ("stop", "[1]"),
        ("stop", '[""]'),
        ("stop_token_ids", "[-1]"),
        ("stop_token_ids", f"[{VOCAB}]"),
        ("logit_bias", '{"x": 1}'),
        ("logit_bias", f'{{"{VOCAB}": 1}}'),
        ("logprobs", "21"),
        ("logprobs", "true"),
    ],
)
def test_other_parameters(preparer: Preparer, field: str, value: str) -> None:
    given = parse_json(f'{{"prompt": "a", "{field}": {value}}}')
    with pytest.raises(ValueError, match=f"^{field}"):
        preparer.prepare(given)


def test_a_line_overrides_the_defaults_and_bad_ones_harm_nobody(preparer: Preparer) -> None:
    def prepared(**fields: Any) -> Any:
        return preparer.prepare(parse_json(json.dumps({"prompt": "ab"} | fields))).sampling

    assert prepared().temperature == 0.5
    assert prepared(temperature=1).temperature == 1.0
    assert prepared(stop="x").stop == ("x",)
    assert prepared(logit_bias={"3": -1}).logit_bias == {3: -1.0}


def test_end_ids_and_stop_ids_go_to_the_device(preparer: Preparer) -> None:
    def stops(**fields: Any) -> tuple[int, ...]:
        return preparer.prepare(parse_json(json.dumps({"prompt": "ab"} | fields))).stop_ids

    assert stops(stop_token_ids=[5, 257]) == (257, 5)
    assert stops(stop_token_ids=[5], ignore_eos=True) == (5,)


def test_a_prompt_without_tokens_and_lone_surrogates(preparer: Preparer) -> None:
    with pytest.raises(ValueError, match="prompt: it has no tokens"):
        preparer.prepare(PromptInput(prompt=""))
    with pytest.raises(ValueError, match="prompt: no valid Unicode at character 1"):
        preparer.prepare(parse_json('{"prompt": "a\\ud800"}'))


def test_a_lone_surrogate_is_counted_in_what_was_given_and_not_in_what_a_template_made() -> None:
    template = ChatTemplate("before {{ messages[0]['content'] }}{{ more }}", {})
    tokenizer = Tokenizer(byte_tokenizer(), bos_token=None, template=template)
    preparer = Preparer(tokenizer, vocab_size=VOCAB, end_ids=(), defaults={}, max_model_len=99)
    with pytest.raises(ValueError, match="^prompt: no valid Unicode at character 1$"):
        preparer.prepare(PromptInput(prompt="a\ud800"))
    message = {"role": "user", "content": "hi"}
    given = PromptInput(messages=[message], template_variables={"more": "\ud800"})
    written = "messages, as the chat template writes them: no valid Unicode at character 9"
    with pytest.raises(ValueError, match=f"^{written}$"):
        preparer.prepare(given)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "\udfff", "content": "hi"}, "role: no valid Unicode at character 0"),
        ({"role": "user", "content": "hi\ud800"}, "content: no valid Unicode at character 2"),
        (
            {"role": "user", "content": ["?", {"text": "ok"}, {"text": "b\ud800"}]},
            "content[2].text: no valid Unicode at character 1",
        ),
    ],
)
def test_a_lone_surrogate_of_messages_has_its_place(message: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"messages[1].{place}")):
        PromptInput(messages=[{"role": "user", "content": "hi"}, message])
