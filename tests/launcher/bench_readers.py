"""Streams read as the benchmark clients of the field read them, each with what it trips over.

Every reader takes a server's address and the model's name, sends what its client sends, and gives
what that client would report. One that fails where its client fails raises.
"""

import http.client
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

DATA = b"data: "


class Report(NamedTuple):
    """``samples``: latencies that the client would take; tokens as it would count them."""

    text: str
    samples: int
    completion_tokens: int | None
    prompt_tokens: int | None = None


def post(port: int, path: str, body: dict[str, Any], **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"connection": "close"} | headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    return response


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"connection": "close"})
    response = connection.getresponse()
    assert 200 <= response.status < 300
    return json.loads(response.read() or b"null")


def data_of(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Objects up to [DONE]; lines that are no data are an error, as for the strictest reader."""
    for raw in response:
        line = raw.strip()
        if not line:
            continue
        assert raw.startswith(DATA), raw
        if line == b"data: [DONE]":
            assert response.read() == b"\n"
            return
        yield json.loads(line[len(DATA) :])
    raise AssertionError("the stream ended without [DONE]")


def vllm_completions(port: int, prompt: str, count: int) -> Report:
    """Asks the model list for a name and its root; every chunk with choices is a sample."""
    card = get(port, "/v1/models")["data"][0]
    assert card["root"]
    body = {
        "model": card["id"], "prompt": prompt, "repetition_penalty": 1.0, "max_tokens": count,
        "logprobs": None, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    text, samples, usage = "", 0, {}
    for data in data_of(post(port, "/v1/completions", body, **{"x-request-id": "bench-0"})):
        if data["choices"]:
            samples += 1
            text += data["choices"][0]["text"] or ""
        elif data.get("usage"):
            usage = data["usage"]
    return Report(text, samples, usage["completion_tokens"], usage["prompt_tokens"])


def vllm_chat(port: int, prompt: str, count: int) -> Report:
    """Content is a list of parts; a delta with a role is no token, an empty one without is."""
    body = {
        "model": get(port, "/v1/models")["data"][0]["id"],
        "messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}],
        "max_completion_tokens": count, "stream": True, "ignore_eos": True, "temperature": 0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    text, samples, tokens = "", 0, None
    for data in data_of(post(port, "/v1/chat/completions", body)):
        if data["choices"]:
            delta = data["choices"][0]["delta"]
            content = delta.get("content")
            samples += content is not None and not (content == "" and delta.get("role"))
            text += content or ""
        elif data.get("usage"):
            tokens = data["usage"]["completion_tokens"]
    return Report(text, samples, tokens)


def sglang_completions(port: int, prompt: str, count: int) -> Report:
    """Asks for no usage, and indexes the choices of every chunk."""
    assert get(port, "/v1/models")
    body = {
        "model": "tiny", "prompt": prompt, "temperature": 0.0, "best_of": 1, "max_tokens": count,
        "stream": True, "ignore_eos": True,
    }  # fmt: skip
    text, samples, tokens = "", 0, None
    for data in data_of(post(port, "/v1/completions", body)):
        piece = data["choices"][0]["text"]
        samples += bool(piece)
        text += piece
        tokens = (data.get("usage") or {}).get("completion_tokens", tokens)
    return Report(text, samples, tokens)


def llmperf_chat(port: int, prompt: str, count: int) -> Report:
    """Cuts six bytes off every line, and wants choices in each."""
    body = {
        "model": "tiny", "max_tokens": count, "stream": True, "ignore_eos": True, "temperature": 0,
        "messages": [{"role": "system", "content": ""}, {"role": "user", "content": prompt}],
    }  # fmt: skip
    text, samples = "", 0
    for raw in post(port, "/v1/chat/completions", body):
        line = raw.strip()
        if not line:
            continue
        stem = line[len(DATA) :]
        if stem == b"[DONE]":
            continue
        data = json.loads(stem)
        assert not data.get("error"), data
        content = data["choices"][0]["delta"].get("content", None)
        if content:
            samples += 1
            text += content
    return Report(text, samples, None)


def guidellm_chat(port: int, prompt: str, count: int) -> Report:
    """Asks for health first, and reads usage from every chunk."""
    get(port, "/health")
    assert [card["id"] for card in get(port, "/v1/models")["data"]] == ["tiny"]
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": prompt}], "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": count, "stop": None, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    text, samples, usage = "", 0, {}
    for data in data_of(post(port, "/v1/chat/completions", body)):
        assert data["id"]
        usage = data.get("usage") or usage
        for choice in data["choices"]:
            piece = choice["delta"].get("content") or ""
            samples += bool(piece)
            text += piece
    return Report(text, samples, usage["completion_tokens"], usage["prompt_tokens"])


def aiperf_completions(port: int, prompt: str, count: int) -> Report:
    """Ignores chunks without the right ``object``, and streams without the right type."""
    body = {
        "model": "tiny", "prompt": prompt, "stream": True, "max_tokens": count, "temperature": 0,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    response = post(port, "/v1/completions", body)
    assert response.headers.get_content_type() == "text/event-stream"
    chunks = [data for data in data_of(response) if data.get("object") == "text_completion"]
    pieces = [choice["text"] for data in chunks for choice in data["choices"]]
    return Report("".join(pieces), len(pieces), chunks[-1]["usage"]["completion_tokens"])


COMPLETION_READERS = (vllm_completions, sglang_completions, aiperf_completions)
CHAT_READERS = (vllm_chat, llmperf_chat, guidellm_chat)
