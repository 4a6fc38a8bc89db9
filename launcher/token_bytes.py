"""The bytes of one token, which may be part of a character."""

from collections.abc import Mapping

from tokenizers import Tokenizer as Backend

_LOOK_LIKE_THEMSELVES = (*range(33, 127), *range(161, 173), *range(174, 256))


class TokenBytes:
    """Bytes by token id, for vocabularies that spell bytes as letters or have tokens for them.

    Args:
        byte_tokens: ids that stand for one byte each.
    """

    def __init__(self, backend: Backend, byte_tokens: Mapping[int, int]) -> None:
        self._backend = backend
        self._byte_tokens = byte_tokens
        self._letters = _letters() if _spells_bytes(backend) else {}
        self._added = set(backend.get_added_tokens_decoder())
        self._anchor = _anchor(backend)

    def of(self, token_id: int) -> bytes:
        """None of an id that the tokenizer has not."""
        byte = self._byte_tokens.get(token_id)
        if byte is not None:
            return bytes([byte])
        piece = self._backend.id_to_token(token_id) or ""
        if self._letters and token_id not in self._added:
            return bytes(self._letters[letter] for letter in piece)
        before = [] if self._anchor is None or token_id in self._added else [self._anchor]
        text: str = self._backend.decode([*before, token_id], skip_special_tokens=False)
        return text[len(before) :].encode()


def _anchor(backend: Backend) -> int | None:
    """A letter's token: decoders may drop the space in front of a text, but none behind it."""
    for piece in ("a", "<0x61>"):
        token_id: int | None = backend.token_to_id(piece)
        if token_id is not None and backend.decode([token_id, token_id]) == "aa":
            return token_id
    return None


def _spells_bytes(backend: Backend) -> bool:
    return backend.decoder is not None and b"ByteLevel" in backend.decoder.__getstate__()


def _letters() -> dict[str, int]:
    """Bytes by letter: those that can be shown are themselves, the others follow after 255."""
    letters = {chr(byte): byte for byte in _LOOK_LIKE_THEMSELVES}
    others = [byte for byte in range(256) if byte not in _LOOK_LIKE_THEMSELVES]
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}
