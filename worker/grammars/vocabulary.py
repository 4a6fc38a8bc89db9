"""The tokens of a model as a grammar sees them: bytes."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Vocabulary(NamedTuple):
    """``tokens`` are the bytes of every id of the model, none for ids without text.

    ``special`` ids stand for no text, whatever their bytes are.
    """

    tokens: Sequence[bytes]
    special: frozenset[int] = frozenset()

    @property
    def size(self) -> int:
        return len(self.tokens)

    def open(self) -> Any:
        """An ``LLTokenizer``. Id ``size``, which the model has not, stands for the text's end."""
        from llguidance import LLTokenizer

        return LLTokenizer(_Tokens(self))  # type: ignore[arg-type]


class _Tokens:
    """A vocabulary in the form that the library reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.size
        self.tokens = [*vocabulary.tokens, b"<end>"]
        self.special_token_ids = sorted({*vocabulary.special, vocabulary.size})

    def __call__(self, text: str) -> list[int]:
        """Never asked for, since no text is forced into tokens."""
        raise NotImplementedError


SINGLE_BYTES = Vocabulary([bytes([byte]) for byte in range(256)])
