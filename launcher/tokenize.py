"""Text to token ids and back, with the model's own tokenizer files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from lockstep.launcher.chat_template import ChatTemplate, Message
from lockstep.launcher.detokenize import IncrementalDetokenizer
from lockstep.launcher.text_check import check_text
from lockstep.launcher.token_bytes import TokenBytes
from lockstep.worker.weights.gguf_metadata import open_gguf
from lockstep.worker.weights.gguf_tokenizer import tokenizer_files

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A model's tokenizer and, if it has one, its chat template. Both are read-only."""

    def __init__(
        self, backend: Backend, *, bos_token: str | None, template: ChatTemplate | None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bos_token = bos_token
        self._bos_id = backend.token_to_id(bos_token) if bos_token else None
        self._template = template
        self._byte_tokens = _byte_tokens(backend)
        self._longest_token = max(map(len, backend.get_vocab()))
        self._token_bytes = TokenBytes(backend, self._byte_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        added = self._backend.get_added_tokens_decoder().items()
        return frozenset(token_id for token_id, token in added if token.special)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens that the model's own tokenizer puts around.

        A beginning-of-text token that ``text`` already spells is not put a second time.

        Raises:
            ValueError: the text holds lone surrogates.
        """
        check_text(text, "prompt")
        ids = self._encode(text, add_special_tokens=True)
        doubled = self._bos_id is not None and ids[:2] == [self._bos_id] * 2
        if doubled and text.startswith(self._bos_token or ""):
            return ids[1:]
        return ids

    def longest_text(self, num_tokens: int) -> int:
        """Characters that ``num_tokens`` tokens can hold at the very most.

        A normalizer may shorten a text before it is cut into tokens, though hardly to a quarter.
        """
        return 4 * num_tokens * self._longest_token

    def render_chat(
        self, messages: list[Message], variables: Mapping[str, Any] | None = None
    ) -> str:
        """Prompt text of a conversation; ``variables`` are for the template.

        Raises:
            ValueError: the model has no chat template, or it refuses the messages.
        """
        if self._template is None:
            raise ValueError("messages: this model has no chat template; pass --chat-template")
        return self._template.render([_flatten(*each) for each in enumerate(messages)], variables)

    def encode_chat(self, prompt_text: str) -> list[int]:
        """Ids of rendered text; the template has already spelled every special token.

        Raises:
            ValueError: the text holds lone surrogates.
        """
        check_text(prompt_text, "messages, as the chat template writes them")
        return self._encode(prompt_text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """Text of ids without special tokens; incomplete characters become U+FFFD."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh one for one request."""
        return IncrementalDetokenizer(self.decode, self._byte_tokens)

    def spell(self, ids: list[int]) -> str:
        """Text of ids with special tokens as they are written; else as ``decode``."""
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token, special ones included, for showing log-probabilities."""
        return self.spell([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, special ones included; they may be part of a character."""
        return self._token_bytes.of(token_id)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Only the form for several texts lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


class NoTokenizer:
    """Stands in for a model without tokenizer files: token ids in, token ids out."""

    has_chat_template = False

    def encode(self, text: str) -> list[int]:
        """Raises ValueError, always."""
        raise ValueError("prompt: this model has no tokenizer; give prompt_token_ids")

    def longest_text(self, num_tokens: int) -> int:
        return 0

    def render_chat(
        self, messages: list[Message], variables: Mapping[str, Any] | None = None
    ) -> str:
        """Raises ValueError, always."""
        raise ValueError("messages: this model has no tokenizer; give prompt_token_ids")

    def encode_chat(self, prompt_text: str) -> list[int]:
        return self.encode(prompt_text)

    def decode(self, ids: list[int]) -> str:
        return ""

    def spell(self, ids: list[int]) -> str:
        return ""

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.decode)

    def token_text(self, token_id: int) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""


AnyTokenizer = Tokenizer | NoTokenizer


def load_tokenizer(path: str, *, chat_template: str | None = None) -> Tokenizer:
    """Read the tokenizer of a Hugging Face directory or a GGUF file.

    Args:
        path: the model's directory or file.
        chat_template: a jinja file used instead of the model's template.

    Raises:
        ValueError: a file is missing or cannot be read; names it.
    """
    files = read_files(path)
    if TOKENIZER not in files:
        raise ValueError(f"tokenizer: {Path(path) / TOKENIZER} is missing")
    # The library raises bare Exception for a damaged file.
    try:
        backend = Backend.from_str(files[TOKENIZER])
    except Exception as error:
        raise ValueError(f"tokenizer: {path}: {TOKENIZER} cannot be read: {error}") from None
    settings = _json(files, SETTINGS)
    special = _special_tokens(settings | _json(files, SPECIAL_TOKENS))
    source = _override(chat_template) or files.get(TEMPLATE) or _template_entry(settings)
    template = ChatTemplate(source, special) if source else None
    return Tokenizer(backend, bos_token=special.get("bos_token"), template=template)


def read_files(path: str) -> dict[str, str]:
    """Texts of the tokenizer's files by name; those of a GGUF file are made from its metadata."""
    if path.endswith(".gguf"):
        return tokenizer_files(open_gguf(path))
    names = (TOKENIZER, SETTINGS, SPECIAL_TOKENS, TEMPLATE)
    files = [Path(path) / name for name in names]
    return {file.name: file.read_text(encoding="utf-8") for file in files if file.is_file()}


def _byte_tokens(backend: Backend) -> dict[int, int]:
    """Byte values of the ids ``<0x00>`` .. ``<0xFF>``, if the decoder falls back to bytes."""
    decoder = backend.decoder
    if decoder is None or b"ByteFallback" not in decoder.__getstate__():
        return {}
    ids = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {token_id: byte for byte, token_id in ids.items() if token_id is not None}


def _json(files: dict[str, str], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, "{}"))
    except ValueError as error:
        raise ValueError(f"tokenizer: {name} is not JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name; a file holds each as text or as an object with ``content``."""
    found = {name: settings.get(name) for name in _SPECIAL}
    texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _override(chat_template: str | None) -> str | None:
    if chat_template is None:
        return None
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"chat_template {chat_template}: {error}") from None


def _template_entry(settings: dict[str, Any]) -> str | None:
    """One text, or several with names of which "default" is for plain chat."""
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default") or next(iter(named.values()), None)
    return source if isinstance(source, str) else None


def _flatten(number: int, message: Message) -> Message:
    """Content given as a list of text parts becomes one text, which every template takes."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for place, part in enumerate(content):
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            field = f"messages[{number}].content[{place}]"
            raise ValueError(f'{field}: a part {{"type": "text", "text": ...}} is needed')
    return message | {"content": "".join(part["text"] for part in content)}
