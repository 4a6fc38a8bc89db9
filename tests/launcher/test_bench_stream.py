"""When a streamed answer's tokens came, from frames with known times."""

import json
from typing import Any

import pytest

from lockstep.launcher.bench.records import RequestRecord
from lockstep.launcher.bench.stream import AnswerClock


def read(frames: list[tuple[float, Any]]) -> RequestRecord:
    """Frames at their times, of a request sent at 100.0 in a run that began at 90.0."""
    clock = AnswerClock(100.0)
    for now, frame in frames:
        text = frame if isinstance(frame, str) else f"data: {json.dumps(frame)}"
        clock.feed(f"{text}\n\n".encode(), now)
    return clock.record(90.0)


def text(value: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish_reason}]}


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def test_completions_with_usage() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}
    found = read([
        (100.5, text("a")), (100.75, text("")), (101.25, text("b", "length")),
        (101.5, usage), (101.5, "data: [DONE]"),
    ])  # fmt: skip
    assert found == RequestRecord(
        start_s=10.0, latency_s=1.25, ttft_s=0.5, itl_s=[0.25, 0.5],
        num_prompt_tokens=7, num_output_tokens=4,
    )  # fmt: skip
    assert found.tpot_s == 0.25


def test_an_end_without_text_is_no_token_and_without_usage_frames_are_counted() -> None:
    found = read([(100.5, text("a")), (101.0, text("b")), (109.0, text("", "stop"))])
    assert (found.latency_s, found.num_output_tokens, found.num_prompt_tokens) == (1.0, 2, 0)


def test_the_opening_of_a_chat_is_no_token() -> None:
    found = read([
        (100.125, delta(role="assistant", content="")), (100.5, delta(content="")),
        (100.75, delta(content="x")), (101.0, delta(reasoning_content="y")),
        (102.0, delta("stop")),
    ])  # fmt: skip
    assert (found.ttft_s, found.itl_s, found.num_output_tokens) == (0.5, [0.25, 0.25], 3)


def test_comments_and_other_fields_say_nothing() -> None:
    found = read([(100.1, ": keep-alive"), (100.2, "event: x"), (101.0, text("a", "stop"))])
    assert (found.ttft_s, found.error) == (1.0, "")


def test_frames_may_come_in_any_pieces() -> None:
    whole = f"data: {json.dumps(text('a'))}\r\n\r\ndata: {json.dumps(text('b', 'stop'))}\n\n"
    for size in range(1, len(whole) + 1):
        clock = AnswerClock(100.0)
        for first in range(0, len(whole), size):
            clock.feed(whole[first : first + size].encode(), 101.0 + first)
        found = clock.record(100.0)
        assert (found.num_output_tokens, found.error) == (2, "")
        assert found.ttft_s <= 1.0 + len(whole) // 2 + 2


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([], "the answer has no token"),
        ([(100.5, text("a"))], "the stream broke off"),
        (
            [(100.5, text("a")), (101.0, {"error": {"message": "out of luck"}})],
            'the server sent an error: {"message": "out of luck"}',
        ),
    ],
)
def test_what_is_no_whole_answer_has_failed(frames: list[tuple[float, Any]], error: str) -> None:
    assert read(frames) == RequestRecord(start_s=10.0, error=error)


def test_a_frame_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="malformed"):
        read([(100.5, "data: {oops")])
