"""A streamed answer, frame by frame: when each token came, and how it ended."""

import json
from typing import Any

import msgspec

from lockstep.launcher.bench.records import RequestRecord

_PREFIX = b"data:"
_END = b"[DONE]"


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class AnswerClock:
    """Takes the bytes of a stream as they arrive.

    Args:
        now: seconds on the clock of all later calls, when the request was sent.
    """

    def __init__(self, now: float) -> None:
        self._sent = now
        self._arrivals: list[float] = []
        self._usage: _Usage | None = None
        self._finished = False
        self._error = ""
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """The next bytes of the body. What is no data line of an event says nothing.

        Raises:
            ValueError: a frame is no JSON of the API.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line, now)

    def record(self, run_start: float) -> RequestRecord:
        """What came. A stream without an end or without a token has failed."""
        start_s, error = self._sent - run_start, self._error
        if not error and not self._arrivals:
            error = "the answer has no token"
        if not error and not self._finished:
            error = "the stream broke off"
        if error:
            return RequestRecord(start_s=start_s, error=error)
        times = self._arrivals
        usage = self._usage or _Usage(completion_tokens=len(times))
        return RequestRecord(
            start_s=start_s,
            latency_s=times[-1] - self._sent,
            ttft_s=times[0] - self._sent,
            itl_s=[later - earlier for earlier, later in zip(times, times[1:], strict=False)],
            num_prompt_tokens=usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens,
        )

    def _line(self, line: bytes, now: float) -> None:
        data = line.removeprefix(_PREFIX).strip() if line.startswith(_PREFIX) else b""
        if not data or data == _END:
            return
        chunk = _decode(data)
        self._usage = chunk.usage or self._usage
        if chunk.error is not None:
            self._error = f"the server sent an error: {json.dumps(chunk.error)}"
        for choice in chunk.choices:
            self._finished |= choice.finish_reason is not None
            if _is_token(choice):
                self._arrivals.append(now)


def _is_token(choice: _Choice) -> bool:
    """A token may have no text yet; the opening of a chat and the notice of an end are none."""
    delta = choice.delta or _Delta(content=choice.text)
    if delta.content or delta.reasoning_content:
        return True
    return delta.content is not None and delta.role is None and choice.finish_reason is None
