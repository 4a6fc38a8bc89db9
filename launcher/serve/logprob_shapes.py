"""Log-probabilities as the two APIs of OpenAI write them."""

from collections.abc import Callable
from typing import Any

import msgspec

Described = list[dict[str, Any]]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists, an entry a token.

    ``text_offset``: where in the choice's text that of a token begins, in characters. Tokens that
    are parts of one character all have its place; none lies beyond the text.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]


def completion_logprobs(described: Described) -> CompletionLogprobs:
    """Of tokens as an ``OutputAssembler`` describes them."""
    return CompletionLogprobs(
        tokens=[each["token"] for each in described],
        token_logprobs=[each["logprob"] for each in described],
        top_logprobs=[_best(each) for each in described],
        text_offset=[each["text_offset"] for each in described],
    )


def _best(described: dict[str, Any]) -> dict[str, float]:
    """The likeliest tokens and the one that was taken. Of equal texts the likeliest stays."""
    pairs = [(top["token"], top["logprob"]) for top in described["top"]]
    pairs.append((described["token"], described["logprob"]))
    return dict(reversed(pairs))


def chat_logprobs(described: Described, token_bytes: Callable[[int], bytes]) -> ChatLogprobs:
    """Of tokens as an ``OutputAssembler`` describes them; bytes are given by their id."""

    def name(each: dict[str, Any]) -> tuple[str, float, list[int]]:
        return each["token"], each["logprob"], list(token_bytes(each["token_id"]))

    return ChatLogprobs(
        [
            ChatLogprob(*name(each), [TopLogprob(*name(top)) for top in each["top"]])
            for each in described
        ]
    )
