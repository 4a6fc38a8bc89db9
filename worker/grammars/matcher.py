"""Where one request is in its grammar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.worker.grammars.grammar import GrammarError
from lockstep.worker.grammars.reasons import reason

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matcher:
    """Follows a request token by token.

    ``mask`` has a bit for each token that may come next, as ``LaneMask.words``. ``complete`` says
    that nothing may: the text is whole, and can only end.

    Args:
        state: the library's, before the first token; it is this matcher's own.
        form: the field of ``StructuredOutputs`` that the grammar is of, for errors.
        vocab_size: of the model; id ``vocab_size`` of ``state`` stands for the end.
        ends: tokens by which the model may end a text that is whole.

    Raises:
        GrammarError: no token may come next, and the text is not whole either.
    """

    __slots__ = ("_ends", "_form", "_state", "_vocab_size", "complete", "mask")

    def __init__(self, state: "LLMatcher", form: str, vocab_size: int, ends: Sequence[int]) -> None:
        self._state = state
        self._form = form
        self._vocab_size = vocab_size
        self._ends = ends
        self._look()

    def take(self, token_id: int) -> None:
        """Go on by a token. Raises GrammarError: the grammar does not allow it, or is too large."""
        if not self._state.consume_token(token_id):
            raise self._error(self._state.get_error())
        self._look()

    def _look(self) -> None:
        bits = bytearray(self._state.compute_bitmask())
        if self._state.is_error():
            raise self._error(self._state.get_error())
        may_end = _take_bit(bits, self._vocab_size)
        for token_id in self._ends:
            _take_bit(bits, token_id)
        may_go_on = bits != bytes(len(bits))
        if not (may_end or may_go_on):
            raise self._error("no token of the model can continue the text")
        self.complete = not may_go_on
        for token_id in self._ends if may_end else ():
            bits[token_id >> 3] |= 1 << (token_id & 7)
        self.mask = bytes(bits[: 4 * -(-self._vocab_size // 32)])

    def _error(self, said: str) -> GrammarError:
        return GrammarError(f"{self._form}: {reason(said)}")


def _take_bit(bits: bytearray, token_id: int) -> bool:
    """Clear a bit; True if it was set."""
    bit = 1 << (token_id & 7)
    was = bits[token_id >> 3] & bit
    bits[token_id >> 3] &= ~bit
    return bool(was)
