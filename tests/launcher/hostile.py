"""Calls as only an enemy or a broken client makes them, from a seed; and some that are right."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from byte_model import VOCAB

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ODD: tuple[Any, ...] = (
    float("nan"), float("inf"), float("-inf"), -1, 0, 2**31, 2**63, 2**70, 1e308, 1.5, "nan", "",
    "\x00", [], {}, [None], True, False, None, "\ud800", [[]], {"a": 1}, -(2**63) - 1,
)  # fmt: skip
FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop",
    "stop_token_ids", "logit_bias", "logprobs", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos", "n", "stream", "stream_options", "echo", "best_of", "model",
    "request_id", "prompt", "messages", "sampling", "response_format",
    "structured_outputs", "unknown", "user",
)  # fmt: skip


@dataclass
class HostileCall:
    """What is sent, and after how many seconds its client leaves (None: it stays)."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    leave_after_s: float | None = None


def hostile_calls(count: int, *, seed: int) -> list[HostileCall]:
    rng = random.Random(seed)
    return [rng.choice(_KINDS)(rng) for _ in range(count)]


def dropped_calls(count: int, *, seed: int) -> list[HostileCall]:
    """Calls whose clients all leave, most of them before the end of their answer."""
    rng = random.Random(seed)
    return [_leaves(rng) for _ in range(count)]


def _base(rng: random.Random) -> tuple[str, dict[str, Any]]:
    text = "".join(rng.choices("ab \u00e9\U0001f600<", k=rng.randint(1, 12)))
    more = {"max_tokens": rng.randint(1, 12), "stream": rng.random() < 0.5}
    if rng.random() < 0.5:
        return COMPLETIONS, {"prompt": text} | more
    return CHAT, {"messages": [{"role": "user", "content": text}]} | more


def _call(path: str, body: Any, **more: Any) -> HostileCall:
    return HostileCall(path, json.dumps(body).encode(), **more)


def _odd_value(rng: random.Random) -> HostileCall:
    path, body = _base(rng)
    return _call(
        path, body | {rng.choice(FIELDS): rng.choice(ODD) for _ in range(rng.randint(1, 3))}
    )


def _wrong_ids(rng: random.Random) -> HostileCall:
    ids = [
        rng.choice((0, VOCAB - 1, VOCAB, -1, 2**31, 2**64, True, 2.5, "3", None)) for _ in "1234"
    ]
    return _call(COMPLETIONS, {"prompt": rng.choice((ids, [ids, [1]])), "max_tokens": 2})


def _huge(rng: random.Random) -> HostileCall:
    length = rng.choice((511, 512, 513, 5_000, 60_000))
    return _call(COMPLETIONS, {"prompt": "x" * length, "max_tokens": rng.choice((1, 10**9))})


def _broken_json(rng: random.Random) -> HostileCall:
    path, body = _base(rng)
    data = json.dumps(body).encode()
    return HostileCall(path, rng.choice((data[:-3], b"", b"[" * 5_000, b"\xff" + data, b"null")))


def _duplicate(rng: random.Random) -> HostileCall:
    path, body = _base(rng)
    return _call(path, body, headers={"x-request-id": rng.choice(("same", "same", "\u00e9" * 300))})


def _leaves(rng: random.Random) -> HostileCall:
    path, body = _base(rng)
    body |= {"max_tokens": 200, "ignore_eos": True, "n": rng.randint(1, 3)}
    return _call(path, body, leave_after_s=rng.uniform(0, 0.05))


def _abort(rng: random.Random) -> HostileCall:
    return _call("/abort", {"request_id": rng.choice(("same", "nobody", 7, None))})


def _right(rng: random.Random) -> HostileCall:
    return _call(*_base(rng))


_KINDS: tuple[Callable[[random.Random], HostileCall], ...] = (
    _odd_value, _odd_value, _odd_value, _wrong_ids, _huge, _broken_json, _duplicate, _leaves,
    _abort, _right,
)  # fmt: skip
