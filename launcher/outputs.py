"""From token deltas of one request to its text."""

from typing import Any, NamedTuple

import msgspec

from lockstep.comm.messages import TokenDelta, TokenLogprobs, unpack_ids
from lockstep.launcher.prepare import PreparedRequest
from lockstep.launcher.stop_strings import StopStringMatcher
from lockstep.launcher.tokenize import AnyTokenizer


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request, or its error. ``token_ids`` include the end token if there was one."""

    index: int
    prompt: str | None = None
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: list[dict[str, Any]] | None = None
    error: str | None = None

    def to_record(self) -> dict[str, Any]:
        """What ``--output`` writes for it."""
        if self.error is not None:
            return {"index": self.index, "prompt": self.prompt, "error": self.error}
        record = {name: getattr(self, name) for name in _WRITTEN}
        return record if self.logprobs is None else record | {"logprobs": self.logprobs}


_WRITTEN = ("index", "prompt", "text", "token_ids", "finish_reason", "num_prompt_tokens")


class Piece(NamedTuple):
    """What a delta adds to a request: text that may be shown now, and the tokens taken from it."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[str, Any]]


class OutputAssembler:
    """Collects one request's tokens into text and finds its stop strings.

    Tokens are taken one at a time, so that those after the one that completed a stop string are
    dropped however they were delivered.
    """

    def __init__(self, index: int, request: PreparedRequest, tokenizer: AnyTokenizer) -> None:
        sampling = request.sampling
        self.index = index
        self.prompt = request.prompt
        self._request = request
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopStringMatcher(
            sampling.stop, include_stop=sampling.include_stop_str_in_output
        )
        self._text: list[str] = []
        # Characters that tokens gave, and those of them that no stop string can take away.
        self._num_decoded = self._num_certain = 0
        self._token_ids: list[int] = []
        self._logprobs: list[dict[str, Any]] | None = None if sampling.logprobs is None else []
        self.num_cached_tokens = 0
        self._finish_reason: str | None = None
        self._error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._request.prompt_ids)

    @property
    def finish_reason(self) -> str | None:
        return self._finish_reason

    @property
    def stopped_here(self) -> bool:
        """True if a stop string ended it, so that the scheduler must still be told."""
        return self._matcher.matched is not None

    def push(self, delta: TokenDelta) -> Piece:
        """Take a delta."""
        texts, tokens = len(self._text), len(self._token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        logprobs = delta.logprobs or []
        for position, token_id in enumerate(unpack_ids(delta.token_ids)):
            self._take(token_id, logprobs[position] if position < len(logprobs) else None)
            if self.stopped_here:
                self._finish_reason = "stop"
                break
        else:
            self._finish(delta)
        described = self._logprobs or []
        return Piece("".join(self._text[texts:]), self._token_ids[tokens:], described[tokens:])

    def output(self) -> RequestOutput:
        return RequestOutput(
            index=self.index,
            prompt=self.prompt,
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=self._finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            logprobs=self._logprobs,
            error=self._error,
        )

    def _take(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._token_ids.append(token_id)
        begin, piece = self._num_decoded, self._detokenizer.push(token_id)
        # Before min_tokens a stop string is ordinary text, as an end token would be.
        early = len(self._token_ids) <= self._request.sampling.min_tokens
        self._text.append(piece if early else self._matcher.push(piece))
        self._num_decoded += len(piece)
        self._num_certain += len(self._text[-1])
        if self._logprobs is not None and logprobs is not None:
            offset = min(begin, self._num_certain)
            self._logprobs.append(self._describe(logprobs) | {"text_offset": offset})

    def _finish(self, delta: TokenDelta) -> None:
        if delta.finish_reason is None:
            return
        self._text.append(self._matcher.push(self._detokenizer.flush()))
        self._text.append(self._matcher.flush())
        self._finish_reason = "stop" if self.stopped_here else delta.finish_reason
        if self._finish_reason == "error":
            self._error = delta.error or "the request failed"

    def _describe(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        token_text = self._tokenizer.token_text
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        return {
            "token_id": logprobs.token_id,
            "token": token_text(logprobs.token_id),
            "logprob": logprobs.logprob,
            "rank": logprobs.rank,
            "top": [{"token_id": i, "token": token_text(i), "logprob": p} for i, p in top],
        }
