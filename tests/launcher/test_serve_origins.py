"""Calls from pages of browsers: what they ask first, and the headers that let them read."""

import asyncio
from typing import Any

import pytest
from byte_model import write_byte_model
from fake_engine import FakeEngine
from served import Reply, Served, ask, serving

from lockstep.launcher.errors import ConfigError
from lockstep.launcher.serve.command import parse
from lockstep.launcher.serve.cross_origin import with_cors
from lockstep.launcher.serve.options import ServeOptions

PATH, PAGE = "/v1/completions", "https://a.example"
ORIGIN = "access-control-allow-origin"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = write_byte_model(tmp_path_factory.mktemp("model"))
    with serving(model, FakeEngine().start, options=ServeOptions(api_key=("k",))) as served:
        yield served


def preflight(app: Any) -> Reply:
    return asyncio.run(ask(app, PATH, headers=PREFLIGHT, method="OPTIONS"))


def test_a_preflight_needs_no_key(served: Served) -> None:
    reply = preflight(served.app)
    assert (reply.status, reply.headers[ORIGIN]) == (200, "*")
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "authorization" in reply.headers["access-control-allow-headers"]


def test_answers_streams_and_errors_can_be_read_by_a_page(served: Served) -> None:
    headers = {"origin": PAGE, "authorization": "Bearer k"}
    stream = served.ask(PATH, {"prompt": "abc", "stream": True}, headers)
    assert stream.texts() == ["a", "b", "c"] and len(stream.parts) == 4
    replies = [stream, served.ask(PATH, {}, headers), served.ask(PATH, {}, {"origin": PAGE})]
    replies += [served.ask("/nowhere", None, headers)]
    assert [reply.status for reply in replies] == [200, 400, 401, 404]
    assert [reply.headers[ORIGIN] for reply in replies] == ["*"] * 4


def test_a_failure_of_the_server_can_be_read_too(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(served.state), "open_service", lambda self: 1 // 0)
    reply = served.ask(PATH, {}, {"origin": PAGE, "authorization": "Bearer k"})
    assert (reply.status, reply.headers[ORIGIN]) == (500, "*")


@pytest.mark.parametrize(
    ("flags", "status", "origin"),
    [
        (["--allowed-origins", f'["{PAGE}"]'], 200, PAGE),
        (["--allowed-origins", "[]"], 400, None),
        (["--allowed-methods", '["GET"]'], 400, "*"),
        (["--allowed-headers", '["x"]'], 400, "*"),
        (["--allow-credentials"], 200, PAGE),
    ],
)
def test_flags_are_those_of_vllm(flags: list[str], status: int, origin: str | None) -> None:
    async def nothing(*_: Any) -> None:
        raise AssertionError("preflights end before")

    reply = preflight(with_cors(nothing, parse(["m", *flags]).options))
    assert (reply.status, reply.headers.get(ORIGIN)) == (status, origin)


def test_a_list_that_is_none_is_refused() -> None:
    for text in ("*", '"*"', "[1]"):
        with pytest.raises(ConfigError, match="--allowed-origins: must be a JSON list of texts"):
            parse(["m", "--allowed-origins", text])
