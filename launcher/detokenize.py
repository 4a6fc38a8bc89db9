"""Token ids to text as they arrive, never showing half a character."""

import codecs
from collections.abc import Callable, Mapping

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, so at most three of them can be waiting for the rest.
_MAX_WAITING = 3
_WINDOW = 32
_CONTEXT = 6

Decode = Callable[[list[int]], str]


class IncrementalDetokenizer:
    """Text of a growing list of ids; the pieces joined are the text of all ids.

    A trailing U+FFFD may be a character whose other bytes are still to come, so up to three are
    held back; more cannot be one character and go out. Only a window of ids is decoded again. It
    begins with ids already shown, since a decoder may treat its first token differently.

    Args:
        decode: text of ids, with U+FFFD for bytes that are no character.
        byte_tokens: ids that stand for one byte each, in vocabularies that fall back to bytes.
            Their decoders give up on a whole run with one bad byte, so these are decoded here.
    """

    def __init__(self, decode: Decode, byte_tokens: Mapping[int, int] | None = None) -> None:
        self._decode = decode
        self._byte_tokens = byte_tokens or {}
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_bytes = False
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        byte = self._byte_tokens.get(token_id)
        if byte is not None:
            self._ids.append(token_id)
            self._in_bytes = True
            return self._bytes.decode(bytes([byte]))
        before = self._end_bytes()
        self._ids.append(token_id)
        text = self._decode(self._ids)
        waiting = min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_WAITING)
        piece = self._show(text, len(text) - waiting)
        if len(self._ids) >= _WINDOW:
            self._shorten(waiting)
        return before + piece

    def flush(self) -> str:
        """What was held back; no more ids will come."""
        before = self._end_bytes()
        text = self._decode(self._ids)
        return before + self._show(text, len(text))

    def _end_bytes(self) -> str:
        if not self._in_bytes:
            return ""
        self._in_bytes = False
        self._shown = len(self._decode(self._ids))
        return self._bytes.decode(b"", final=True)

    def _show(self, text: str, end: int) -> str:
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _shorten(self, waiting: int) -> None:
        # A cut inside a character leaves bytes that no later byte can complete, so counts hold.
        self._ids = self._ids[-_CONTEXT:]
        self._shown = max(len(self._decode(self._ids)) - waiting, 0)
