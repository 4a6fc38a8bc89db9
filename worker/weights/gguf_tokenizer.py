"""The tokenizer of a GGUF file, as the files a Hugging Face directory would hold. No torch."""

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from lockstep.worker.weights.gguf_metadata import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(file: GGUFFile) -> dict[str, str]:
    """Text of ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template) by name.

    Raises:
        ValueError: the file's tokenizer model or pre-tokenizer is not supported (named).
    """
    return {
        "tokenizer.json": build_tokenizer(file).to_str(),
        "tokenizer_config.json": json.dumps(_settings(file), indent=2, ensure_ascii=False),
    }


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """A BPE tokenizer: over bytes ("gpt2") or over pieces with scores ("llama").

    Raises:
        ValueError: another kind; names it.
    """
    kind = file.need("tokenizer.ggml.model")
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, adds_bos = _scored_pieces(file, tokens), True
    else:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama"
        )
    _mark_special(tokenizer, tokens, file.need("tokenizer.ggml.token_type"))
    if file.get("tokenizer.ggml.add_bos_token", adds_bos):
        _put_bos_first(tokenizer, tokens, file.need("tokenizer.ggml.bos_token_id"))
    return tokenizer


def _settings(file: GGUFFile) -> dict[str, Any]:
    tokens = file.need("tokenizer.ggml.tokens")
    settings: dict[str, Any] = {}
    for name, key in _SPECIAL.items():
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            settings[name] = tokens[token_id]
    template = file.get("tokenizer.chat_template")
    return settings if template is None else settings | {"chat_template": template}


def _byte_level(file: GGUFFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether its kind puts a beginning token when the file does not say."""
    pre = file.need("tokenizer.ggml.pre")
    splitter = _splitters().get(pre)
    if splitter is None:
        known = ", ".join(_splitters())
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported; supported: {known}"
        )
    is_llama3 = pre == "llama-bpe"
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=is_llama3))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, is_llama3


def _splitters() -> dict[str, pre_tokenizers.PreTokenizer]:
    byte_level = pre_tokenizers.ByteLevel
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "gpt-2": byte_level(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence([digits, byte_level(add_prefix_space=False)]),
        "llama-bpe": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated"),
                byte_level(add_prefix_space=False, use_regex=False),
            ]
        ),
    }


def _scored_pieces(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges_of_scores(vocab, file.need("tokenizer.ggml.scores"))
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    model = BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first."""
    splits = [
        (scores[token_id], token[:i], token[i:])
        for token, token_id in vocab.items()
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]
    splits.sort(key=lambda split: -split[0])
    return [(left, right) for _, left, right in splits]


def _mark_special(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    of_type = {
        kind: [t for t, k in zip(tokens, types, strict=True) if k == kind] for kind in (3, 4)
    }
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in of_type[_CONTROL]]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in of_type[_USER_DEFINED]])


def _put_bos_first(tokenizer: Tokenizer, tokens: list[str], bos_id: int) -> None:
    bos = tokens[bos_id]
    tokenizer.post_processor = TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
    )
