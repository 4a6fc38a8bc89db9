"""What the front end counts of requests. Runs once a token, so it holds plain numbers only."""

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from lockstep.worker.schedule.histogram import empty_histogram

UNPLACED = -1
# Upper bounds in seconds and in tokens are those of vLLM, so that percentiles compare; ours go
# further down.
_FIRST_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15,
    0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0,
    20_000.0, 50_000.0, 100_000.0, 200_000.0,
)  # fmt: skip


class Ended(NamedTuple):
    """A request that has ended just now; ``first_token_s`` is None if it got no token."""

    req_id: str
    reason: str
    dp_rank: int
    num_prompt_tokens: int
    num_tokens: int
    seconds: float
    first_token_s: float | None


class RequestTotals:
    """Of all requests of one replica since the start; times in seconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.tokens = 0
        self.finished: Counter[str] = Counter()
        self.first_token = empty_histogram(_FIRST_S)
        self.inter_token = empty_histogram(_TOKEN_S)
        self.per_output_token = empty_histogram(_TOKEN_S)
        self.decode = empty_histogram(_REQUEST_S)
        self.end_to_end = empty_histogram(_REQUEST_S)
        self.prompt_length = empty_histogram(_TOKENS)
        self.output_length = empty_histogram(_TOKENS)


class RequestMetrics:
    """Totals by replica; requests that no replica answered are counted under ``UNPLACED``.

    Args:
        on_end: hears of each request that ends.
    """

    def __init__(self, on_end: Callable[[Ended], None] | None = None) -> None:
        self.num_accepted = 0
        self.on_end = on_end
        self._totals: dict[int, RequestTotals] = {}

    def accept(self, req_id: str, num_prompt_tokens: int) -> "RequestClock":
        self.num_accepted += 1
        return RequestClock(self, req_id, num_prompt_tokens)

    def totals(self, dp_rank: int) -> RequestTotals:
        found = self._totals.get(dp_rank)
        if found is None:
            found = self._totals[dp_rank] = RequestTotals()
        return found

    def by_replica(self) -> dict[int, RequestTotals]:
        """In order of dp_rank; another thread may ask."""
        return dict(sorted(self._totals.copy().items()))


class RequestClock:
    """One request from its admission on; tells the totals of its replica."""

    __slots__ = (
        "_began", "_dp_rank", "_first", "_last", "_metrics", "_num_prompt", "_num_tokens",
        "_req_id", "_totals",
    )  # fmt: skip

    def __init__(self, metrics: RequestMetrics, req_id: str, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._req_id = req_id
        self._dp_rank = UNPLACED
        self._num_prompt = num_prompt_tokens
        self._num_tokens = 0
        self._totals: RequestTotals | None = None
        self._began = self._first = self._last = time.monotonic()

    def advance(self, dp_rank: int, num_tokens: int, now: float) -> None:
        """Tokens of its replica have come; those that come together count as one wait."""
        if not num_tokens:
            return
        totals = self._totals
        if totals is None:
            totals = self._begin(dp_rank, now)
        else:
            totals.inter_token.observe(now - self._last)
        self._last = now
        self._num_tokens += num_tokens
        totals.tokens += num_tokens

    def finish(self, reason: str, now: float, dp_rank: int = UNPLACED) -> None:
        """It ended, for whatever reason; to be called once."""
        totals = self._totals or self._metrics.totals(dp_rank)
        totals.finished[reason] += 1
        totals.end_to_end.observe(now - self._began)
        totals.output_length.observe(self._num_tokens)
        if self._totals is not None:
            decode_s = self._last - self._first
            totals.decode.observe(decode_s)
            if self._num_tokens > 1:
                totals.per_output_token.observe(decode_s / (self._num_tokens - 1))
        if self._metrics.on_end is not None:
            self._metrics.on_end(self._ended(reason, now))

    def _ended(self, reason: str, now: float) -> Ended:
        first_token_s = None if self._totals is None else self._first - self._began
        return Ended(
            self._req_id,
            reason,
            self._dp_rank,
            self._num_prompt,
            self._num_tokens,
            now - self._began,
            first_token_s,
        )

    def _begin(self, dp_rank: int, now: float) -> RequestTotals:
        totals = self._totals = self._metrics.totals(dp_rank)
        self._dp_rank = dp_rank
        self._first = now
        totals.first_token.observe(now - self._began)
        totals.prompt_tokens += self._num_prompt
        totals.prompt_length.observe(self._num_prompt)
        return totals
