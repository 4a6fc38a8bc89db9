"""Tokenizer files, chat templates, and text as it streams (fault 82)."""

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import given
from hypothesis import strategies as st
from token_backends import byte_fallback, byte_level
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from lockstep.launcher.chat_template import ChatTemplate
from lockstep.launcher.detokenize import IncrementalDetokenizer
from lockstep.launcher.tokenize import Tokenizer, load_tokenizer

CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role: ' + m['role']) }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer_of(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, bos_token=None, template=None)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.detokenizer()
    pieces = [stream.push(i) for i in ids]
    return "".join(pieces) + stream.flush()


def ids_of_bytes(backend: Backend, data: bytes) -> list[int]:
    table = {text: token_id for text, token_id in backend.get_vocab().items()}
    shown = {b: c for b, c in zip(_alphabet_bytes(), _alphabet(), strict=True)}
    return [table[shown[b]] for b in data]


def _alphabet_bytes() -> list[int]:
    """Bytes in the order of the GPT-2 alphabet: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [b for b in range(256) if b not in printable]


def _alphabet() -> list[str]:
    printable = _alphabet_bytes()[:188]
    return [chr(b) for b in printable] + [chr(256 + n) for n in range(68)]


TEXTS = [
    "plain",
    "emoji \U0001f600\U0001f9d1\u200d\U0001f680 and more",
    "\u6f22\u5b57\u304b\u306a " * 20,
    "combining e\u0301 a\u0308",
    "replacement \ufffd itself",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_of_bytes_equals_the_whole(text: str) -> None:
    backend = byte_level()
    tokenizer = tokenizer_of(backend)
    ids = ids_of_bytes(backend, text.encode())
    assert streamed(tokenizer, ids) == text


@given(st.lists(st.one_of(st.binary(max_size=6), st.text(max_size=3).map(str.encode)), max_size=40))
def test_a_stream_of_any_bytes_equals_the_lossy_whole(parts: list[bytes]) -> None:
    backend = byte_level()
    tokenizer = tokenizer_of(backend)
    ids = ids_of_bytes(backend, b"".join(parts))
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_half_a_character_is_never_shown() -> None:
    backend = byte_level()
    stream = tokenizer_of(backend).detokenizer()
    pieces = [stream.push(i) for i in ids_of_bytes(backend, "x\U0001f600y".encode())]
    assert pieces == ["x", "", "", "", "\U0001f600", "y"]


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["level", "fallback"])
def test_every_byte_is_known_by_its_token(backend: Backend) -> None:
    tokenizer = tokenizer_of(backend)
    names = [f"<0x{b:02X}>" for b in range(256)]
    fallback = backend.token_to_id(names[0]) is not None
    data = bytes(range(256))
    ids = [backend.token_to_id(n) for n in names] if fallback else ids_of_bytes(backend, data)
    assert b"".join(map(tokenizer.token_bytes, ids)) == data
    special = "<unk>" if fallback else "</s>"
    assert tokenizer.token_bytes(backend.token_to_id(special)) == special.encode()


def test_bytes_of_a_token_have_the_space_that_a_text_loses_at_its_beginning() -> None:
    backend = byte_fallback()
    tokenizer = tokenizer_of(backend)
    ids = [backend.token_to_id(f"\u2581{word}") for word in ("hello", "world")]
    assert tokenizer.decode(ids) == "hello world"
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" hello world"
    assert tokenizer.special_ids == frozenset()
    assert tokenizer_of(byte_level()).special_ids == {256, 257}


def test_invalid_bytes_do_not_stall() -> None:
    backend = byte_level()
    stream = tokenizer_of(backend).detokenizer()
    shown = "".join(stream.push(i) for i in ids_of_bytes(backend, b"\xff" * 300))
    assert len(shown) >= 297
    assert shown + stream.flush() == "\ufffd" * 300


def test_byte_fallback_keeps_neighbouring_characters_whole() -> None:
    tokenizer = tokenizer_of(byte_fallback())
    text = "hello \U0001f600\U0001f600 world\u6f22"
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids) == text
    stream = tokenizer.detokenizer()
    assert all("\ufffd" not in stream.push(i) for i in ids)


def test_byte_fallback_shows_a_bad_byte_alone() -> None:
    backend = byte_fallback()
    tokenizer = tokenizer_of(backend)
    bad = [backend.token_to_id(f"<0x{b:02X}>") for b in b"\xc3\xa9\xff\xc3\xa9"]
    assert streamed(tokenizer, [*bad, backend.token_to_id("\u2581hello")]) == (
        "\u00e9\ufffd\u00e9 hello"
    )


def test_long_streams_decode_a_bounded_window() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join(map(chr, ids))

    stream = IncrementalDetokenizer(decode)
    text = "".join(stream.push(ord("a") + i % 26) for i in range(1000))
    assert len(text) == 1000
    assert longest <= 32


def write_model(directory: Path, **settings: object) -> str:
    byte_level().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(directory)


def test_chat_is_rendered_with_one_beginning_token(tmp_path: Path) -> None:
    bos = {"content": "<s>", "special": True}
    tokenizer = load_tokenizer(write_model(tmp_path, chat_template=CHAT, bos_token=bos))
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<s><user>hi\n<assistant>"
    ids = tokenizer.encode_chat(text)
    assert ids.count(tokenizer.encode("")[0]) == 1


def test_raw_text_that_spells_the_beginning_token_has_it_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, bos_token="<s>"))
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi")
    assert len(tokenizer.encode("<s><s>hi")) == len(tokenizer.encode("hi")) + 1


def test_text_parts_are_joined_and_others_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, chat_template=CHAT, bos_token="<s>"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<user>ab\n" in tokenizer.render_chat([{"role": "user", "content": parts}])
    with pytest.raises(ValueError, match=r"^messages\[0\].content\[0\]: a part"):
        tokenizer.render_chat([{"role": "user", "content": [{"type": "image_url"}]}])


def test_a_refusal_of_the_template_is_a_value_error(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, chat_template=CHAT, bos_token="<s>"))
    with pytest.raises(ValueError, match="no such role: robot"):
        tokenizer.render_chat([{"role": "robot", "content": "hi"}])


def test_a_named_template_and_a_file(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    path = write_model(tmp_path, chat_template=named)
    assert load_tokenizer(path).render_chat([]) == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(path).render_chat([]) == "file"
    (tmp_path / "mine.jinja").write_text("mine")
    mine = load_tokenizer(path, chat_template=str(tmp_path / "mine.jinja"))
    assert mine.render_chat([]) == "mine"


def test_a_missing_tokenizer_and_a_missing_template_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        load_tokenizer(str(tmp_path))
    tokenizer = load_tokenizer(write_model(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_the_tokenizer_in_a_gguf_file(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, "<s>", "</s>", "hi"])
    writer.add_token_types([*[TokenType.NORMAL] * 256, *[TokenType.CONTROL] * 2, TokenType.NORMAL])
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(CHAT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = load_tokenizer(str(tmp_path / "model.gguf"))
    text = tokenizer.render_chat([{"role": "user", "content": "hi \u00e9"}])
    assert text == "<s><user>hi \u00e9\n<assistant>"
    ids = tokenizer.encode_chat(text)
    assert ids[0] == 256
    assert 258 in ids
    assert streamed(tokenizer, ids) == text.removeprefix("<s>")


def test_lone_surrogates_are_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path))
    with pytest.raises(ValueError, match="prompt: no valid Unicode at character 2"):
        tokenizer.encode("ab\ud800")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include 'x' %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(ValueError, match="chat template failed"):
        ChatTemplate(source, {}).render([])


def test_what_templates_of_real_models_call() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}\n"
        "    {%- generation %}{{ m.content | tojson }}{% endgeneration %}\n"
        "{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    messages = [{"content": "skipped"}, {"content": "<\u00e9>"}]
    assert ChatTemplate(source, {}).render(messages) == '"<\u00e9>"4'
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% for %}", {})
