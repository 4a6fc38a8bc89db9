"""Tokenizers out of GGUF metadata against those that transformers makes of the same file."""

import json

import gguf_files
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from lockstep.worker.weights.gguf_metadata import open_gguf
from lockstep.worker.weights.gguf_tokenizer import build_tokenizer, tokenizer_files

CORPUS = [
    "The quick brown fox jumps over 13 lazy dogs, isn't it?\n\n  In 2024 they'd   do it again.",
    "def main():\n    print('hello world', 123456)\n\treturn x == y\r\n",
    "Ünïcödé and 日本語 text, émigré naïve café 42 times 3.14159.",
] * 3
_WORDS = [word for text in CORPUS[:3] for word in text.split(" ")]
TEXTS = st.one_of(
    st.text(st.sampled_from("thequick 0123456789'\n\t .,é日"), max_size=60),
    st.text(max_size=30),
    st.lists(st.sampled_from(_WORDS), max_size=8).map(" ".join),
)
SPECIAL = ["<|unk|>", "<|bos|>", "<|eos|>"]
TYPES = {"special": 3, "user": 4, "normal": 1, "byte": 6}


def train(pre_tokenizer, alphabet):
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    by_id = sorted(model["vocab"], key=model["vocab"].get)
    return by_id, [" ".join(merge) for merge in model["merges"]]


def write(path, kind, tokens, types, *, merges=None, scores=None, pre=None, **keys):
    writer = gguf_files.new_writer(path)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([TYPES[name] for name in types])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for add, value in keys.items():
        getattr(writer, add)(value)
    gguf_files.finish(writer)
    return path


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """Writes a byte-level file of some pre-tokenizer kind."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words, merges = train(pre_tokenizers.ByteLevel(add_prefix_space=False), alphabet)
    tokens = [*SPECIAL, *words, "<think>"]
    types = ["special"] * 3 + ["normal"] * len(words) + ["user"]

    def make(pre, *, without=None, **keys):
        path = tmp_path_factory.mktemp("byte") / f"{pre}.gguf"
        kept = [merge for merge in merges if merge != without]
        return write(path, "gpt2", tokens, types, merges=kept, pre=pre, **keys)

    return make


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A file of the sentencepiece kind: scores, bytes to fall back to, no merges."""
    split = pre_tokenizers.Metaspace(prepend_scheme="never")
    words, merges = train(split, list("▁abcdefghijklmnopqrstuvwxyz"))
    order = {merge.replace(" ", ""): rank for rank, merge in enumerate(merges)}
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = ["special"] * 3 + ["byte"] * 256 + ["normal"] * len(words)
    scores = [-float(order.get(token, 10**6)) for token in tokens]
    path = tmp_path_factory.mktemp("scored") / "scored.gguf"
    return write(path, "llama", tokens, types, scores=scores)


def oracle(path):
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, metadata, _ = get_gguf_tokenizer(str(path))
    return convert_gguf_tokenizer(architecture, metadata)[0]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_byte_level_kinds(byte_level, pre):
    path = byte_level(pre)
    ours, theirs = build_tokenizer(open_gguf(path)), oracle(path)

    @settings(deadline=None, max_examples=60)
    @given(TEXTS)
    def same(text):
        marked = f"<|bos|>{text}<think>{text}<|eos|>"
        for each in (text, marked):
            ids = ours.encode(each, add_special_tokens=False).ids
            assert ids == theirs.encode(each, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text, add_special_tokens=False).ids) == text

    same()
    for text in CORPUS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text).ids


def test_smollm_splits_digits_and_is_else_as_gpt2(byte_level):
    # The oracle takes this kind for plain gpt-2; the golden prompts are the other check on it.
    gpt2, smollm = (build_tokenizer(open_gguf(byte_level(pre))) for pre in ("gpt-2", "smollm"))
    assert smollm.encode("x 123456").tokens == ["x", "Ġ", *"123456"]
    assert gpt2.encode("x 123456").tokens == ["x", "Ġ123456"]
    assert smollm.encode(CORPUS[2][:40]).ids == gpt2.encode(CORPUS[2][:40]).ids


def test_llama3_takes_whole_words_before_merging(byte_level):
    # "Ġquick" stays a token, but no merge leads to it any more.
    for pre, expected in (("llama-bpe", ["Ġquick"]), ("gpt-2", ["Ġqu", "ick"])):
        tokenizer = build_tokenizer(open_gguf(byte_level(pre, without="Ġqu ick")))
        assert tokenizer.encode(" quick", add_special_tokens=False).tokens == expected


def test_scored_pieces(scored):
    ours, theirs = build_tokenizer(open_gguf(scored)), oracle(scored)

    @settings(deadline=None, max_examples=60)
    @given(TEXTS.filter(lambda text: text and not text.startswith((" ", "▁"))))
    def same(text):
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids

    same()
    text = "the quick 日本 fox"
    ids = ours.encode(text).ids
    assert ids[0] == 1 and ours.decode(ids) == text


@pytest.mark.parametrize(("better", "tokens"), [("ab", ["▁", "ab", "c"]), ("bc", ["▁", "a", "bc"])])
def test_pieces_with_a_better_score_are_made_first(tmp_path, better, tokens):
    pieces = [*SPECIAL, "▁", "a", "b", "c", "ab", "bc"]
    scores = [-1.0 if piece == better else -2.0 for piece in pieces]
    types = ["special"] * 3 + ["normal"] * 6
    path = write(tmp_path / "few.gguf", "llama", pieces, types, scores=scores)
    tokenizer = build_tokenizer(open_gguf(path))
    assert tokenizer.encode("abc", add_special_tokens=False).tokens == tokens


def test_special_tokens_are_left_out_of_text_and_never_split(byte_level):
    tokenizer = build_tokenizer(open_gguf(byte_level("llama-bpe")))
    ids = tokenizer.encode("<|bos|>hi<|eos|><think>", add_special_tokens=False).ids
    assert (ids[0], ids[-2]) == (1, 2)
    assert tokenizer.decode(ids) == "hi<think>"


@pytest.mark.parametrize(
    ("pre", "says", "adds"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
    ],
)
def test_who_puts_a_beginning_token(byte_level, pre, says, adds):
    keys = {} if says is None else {"add_add_bos_token": says}
    tokenizer = build_tokenizer(open_gguf(byte_level(pre, **keys)))
    assert (tokenizer.encode("hi").ids[0] == 1) == adds
    assert tokenizer.encode("hi", add_special_tokens=False).ids[0] != 1


def test_files_hold_template_and_special_tokens(byte_level):
    files = tokenizer_files(open_gguf(byte_level("smollm", add_chat_template="{{ messages }}")))
    settings_ = json.loads(files["tokenizer_config.json"])
    assert settings_ == {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "unk_token": "<|unk|>",
        "chat_template": "{{ messages }}",
    }
    assert Tokenizer.from_str(files["tokenizer.json"]).encode("12").tokens == ["1", "2"]


def test_what_is_not_supported_is_refused_by_name(byte_level, tmp_path):
    with pytest.raises(ValueError, match="tokenizer.ggml.pre 'tekken' is not supported; supporte"):
        build_tokenizer(open_gguf(byte_level("tekken")))
    path = write(tmp_path / "bert.gguf", "bert", SPECIAL, ["special"] * 3)
    with pytest.raises(ValueError, match="tokenizer.ggml.model 'bert' is not supported; suppor"):
        build_tokenizer(open_gguf(path))
