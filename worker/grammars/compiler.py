"""Grammars of requests, compiled in a thread beside the scheduler's."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.comm.structured import StructuredOutputs
from lockstep.worker.grammars.grammar import compile_grammar
from lockstep.worker.grammars.matcher import Matcher
from lockstep.worker.grammars.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_KEPT = 64


class GrammarCompiler:
    """Compiles in the order of arrival, and keeps the last grammars for others that want them.

    Args:
        load: gives the model's vocabulary, or raises ValueError; called once, in the thread.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._pool = ThreadPoolExecutor(1, "grammars")
        # Reading a large vocabulary takes a second, better now than in front of a request.
        self._opened = self._pool.submit(_open, load)
        # By what was asked for; only the thread looks at it.
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()

    def start(
        self, structured: StructuredOutputs, stop_ids: Sequence[int], named: Sequence[int]
    ) -> Future[Matcher]:
        """Begin to compile; the result may raise ValueError.

        Args:
            stop_ids: tokens that end the request.
            named: those of them that its user named.
        """
        return self._pool.submit(self._compile, structured, stop_ids, frozenset(named))

    def _compile(
        self, structured: StructuredOutputs, stop_ids: Sequence[int], named: frozenset[int]
    ) -> Matcher:
        vocabulary, tokenizer = self._opened.result()
        # A token with text that a user named is text first: the grammar says where it may be.
        ends = [each for each in stop_ids if each in vocabulary.special or each not in named]
        state = self._state(structured, tokenizer).deep_copy()
        return Matcher(state, structured.kind, vocabulary.size, ends)

    def _state(self, structured: StructuredOutputs, tokenizer: Any) -> "LLMatcher":
        key = msgspec.json.encode(structured)
        state = self._kept.pop(key, None) or compile_grammar(structured, tokenizer)
        self._kept[key] = state
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return state


def _open(load: Callable[[], Vocabulary]) -> tuple[Vocabulary, Any]:
    vocabulary = load()
    return vocabulary, vocabulary.open()
