"""Clients that leave, an engine that dies, a failure of ours: over a fake engine."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine, endless
from served import Reply, Served, Visit, ask, await_true, gather, serving

from lockstep.launcher.outputs import OutputAssembler
from lockstep.launcher.prepare import PreparedRequest, Preparer
from lockstep.launcher.serve.life import State
from lockstep.launcher.serve.state import ServerState
from lockstep.launcher.tokenize import Tokenizer

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": "x", "max_tokens": 500, "stream": True}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(endless, step_s=0.005)


@pytest.fixture
def served(model: str, engine: FakeEngine) -> Any:
    with serving(model, engine.start, max_num_seqs=2, max_num_queued_reqs=4) as served:
        yield served


def in_flight(served: Served) -> int:
    assert served.state.service is not None
    return served.state.service.admission.in_flight


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_fault_86_a_client_that_leaves_ends_its_request(
    served: Served, engine: FakeEngine, stream: bool, n: int
) -> None:
    async def come_and_leave() -> Reply:
        visit = Visit()
        asking = asyncio.ensure_future(
            ask(served.app, COMPLETIONS, ENDLESS | {"stream": stream, "n": n}, visit=visit)
        )
        while len(engine.added) < n:
            await asyncio.sleep(0.005)
        visit.leave.set()
        return await asking

    reply = served.run(come_and_leave())
    assert stream or reply.status == 0
    assert in_flight(served) == 0
    await_true(lambda: sorted(engine.aborted) == sorted(add.req_id for add in engine.added))


def test_a_client_that_leaves_after_some_chunks_gets_no_more(served: Served) -> None:
    reply = served.ask(COMPLETIONS, ENDLESS, visit=Visit(leave_after=3))
    assert 3 <= len(reply.parts) < 10


def test_a_stop_string_ends_the_request_in_the_engine_too(
    served: Served, engine: FakeEngine
) -> None:
    reply = served.ask(COMPLETIONS, ENDLESS | {"stop": "xxx", "stream": False})
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    assert reply.json()["usage"]["completion_tokens"] == 3
    await_true(lambda: set(engine.aborted) == {engine.added[0].req_id})


def test_abort_by_the_id_of_an_answer_or_by_the_clients_own(
    served: Served, engine: FakeEngine
) -> None:
    async def abort(name: Callable[[], str]) -> Any:
        while len(engine.added) < 2:
            await asyncio.sleep(0.005)
        return (await ask(served.app, "/abort", {"request_id": name()})).json()

    call = ENDLESS | {"n": 2}
    mine = {"x-request-id": "mine"}
    reply, told = served.run(
        gather(ask(served.app, COMPLETIONS, call, mine), abort(lambda: "mine"))
    )
    assert told == {"aborted": 2} and reply.headers["x-request-id"] == "mine"
    reasons = [event["choices"][0]["finish_reason"] for event in reply.events()]
    assert sorted(filter(None, reasons)) == ["abort", "abort"]

    engine.added.clear()
    call["stream"] = False
    reply, told = served.run(
        gather(
            ask(served.app, COMPLETIONS, call),
            abort(lambda: engine.added[0].req_id.rpartition("-")[0]),
        )
    )
    assert told == {"aborted": 2}
    assert {choice["finish_reason"] for choice in reply.json()["choices"]} == {"abort"}
    assert served.ask("/abort", {"request_id": "nobody"}).json() == {"aborted": 0}
    assert served.ask("/abort", {}).status == 400


def test_fault_74_one_name_twice_is_two_requests(served: Served) -> None:
    call, mine = {"prompt": "ab", "max_tokens": 4}, {"x-request-id": "mine"}
    first, second = served.run(
        gather(*(ask(served.app, COMPLETIONS, call, mine) for _ in range(2)))
    )
    assert first.json()["id"] != second.json()["id"]
    assert [r.json()["choices"][0]["text"] for r in (first, second)] == ["abab"] * 2


def test_a_name_cannot_write_headers(served: Served) -> None:
    for more in ({"stream": True}, {}):
        call = {"prompt": "x", "max_tokens": 1, "request_id": "a\r\nset-cookie: b\u00e9"} | more
        assert served.ask(COMPLETIONS, call).headers["x-request-id"] == "a??set-cookie: b?"


def test_an_engine_that_dies_is_503_for_all_and_named(served: Served, engine: FakeEngine) -> None:
    async def kill() -> None:
        while len(engine.added) < 3:
            await asyncio.sleep(0.005)
        engine.kill()

    streamed, whole, waiting, _ = served.run(
        gather(
            ask(served.app, COMPLETIONS, ENDLESS),
            ask(served.app, COMPLETIONS, ENDLESS | {"stream": False}),
            ask(served.app, COMPLETIONS, ENDLESS | {"stream": False}),
            kill(),
        )
    )
    assert streamed.status == 200
    *_, last = streamed.events()
    assert last["error"]["code"] == 503 and "rank 1 is lost" in last["error"]["message"]
    assert sum("error" in event for event in streamed.events()) == 1
    for reply in (whole, waiting):
        assert reply.status == 503 and "rank 1 is lost" in reply.error()["message"]
        assert "retry-after" in reply.headers
    await_true(lambda: served.death is not None)
    assert served.ask("/health").status == 503
    ready = served.ask("/ready")
    assert ready.status == 503 and "rank 1 is lost" in ready.json()["reason"]
    assert served.ask(COMPLETIONS, ENDLESS).status == 503
    assert served.ask("/v1/models").status == 503


def test_a_stream_that_fails_before_its_first_token_has_a_status(
    served: Served, engine: FakeEngine
) -> None:
    engine.kill()
    assert served.ask(COMPLETIONS, ENDLESS).status == 503


def test_fault_88_a_failure_of_ours_is_500_for_that_request_alone(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.state.service is not None
    tokenizer = type(served.state.service.tokenizer)
    describe = tokenizer.token_text

    def fail_for_seven(self: Any, token_id: int) -> str:
        if token_id == 7:
            raise RuntimeError("out of luck")
        return describe(self, token_id)

    monkeypatch.setattr(tokenizer, "token_text", fail_for_seven)
    call = {"max_tokens": 3, "logprobs": 0}
    asked = [ask(served.app, COMPLETIONS, call | {"prompt": [id]}) for id in (6, 7, 8)]
    six, seven, eight = served.run(gather(*asked))
    assert (six.status, seven.status, eight.status) == (200, 500, 200)
    assert seven.error()["type"] == "internal_server_error"
    await_true(lambda: in_flight(served) == 0 and len(engine.aborted) == 1)


HOOKS = [
    (Tokenizer, "encode", lambda self, text: text),
    (Preparer, "prepare", lambda self, given: given.prompt),
    (PreparedRequest, "to_add", lambda self, req_id: self.prompt),
    (OutputAssembler, "push", lambda self, delta: self.prompt),
]


@pytest.mark.parametrize(("owner", "method", "prompt_of"), HOOKS, ids=lambda each: str(each))
def test_fault_88_wherever_one_of_eight_fails_the_seven_have_their_text(
    model: str, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, prompt_of: Any
) -> None:
    healthy = getattr(owner, method)

    def fail_for_seven(*args: Any) -> Any:
        if prompt_of(*args) == "7":
            raise RuntimeError("out of luck")
        return healthy(*args)

    monkeypatch.setattr(owner, method, fail_for_seven)
    with serving(model, FakeEngine(endless, step_s=0.002).start) as served:
        call = {"max_tokens": 3}
        asked = (ask(served.app, COMPLETIONS, call | {"prompt": str(i)}) for i in range(8))
        *seven, last = served.run(gather(*asked))
        assert [reply.json()["choices"][0]["text"] for reply in seven] == [
            str(i) * 3 for i in range(7)
        ]
        assert last.status == 500 and last.error()["type"] == "internal_server_error"
        await_true(lambda: in_flight(served) == 0)


def test_what_the_engine_refuses_is_500_once(model: str) -> None:
    with serving(model, FakeEngine(max_model_len=3).start) as served:
        reply = served.ask(COMPLETIONS, {"prompt": "far too long", "stream": True})
        assert reply.status == 500 and "max_model_len=3" in reply.error()["message"]
        assert served.ask(COMPLETIONS, {"prompt": "ok"}).status == 200


def test_nothing_is_taken_while_loading_or_draining(served: Served) -> None:
    life = served.state.life
    life.drain()
    assert served.ask("/ready").json()["status"] == "draining"
    assert (served.ask("/ready").status, served.ask("/health").status) == (503, 200)
    assert served.ask(COMPLETIONS, ENDLESS).status == 503
    life.state = State.LOADING
    life.stage("weights", 3, 10)
    report = served.ask("/ready").json()
    assert (report["status"], report["stage"]) == ("loading", "weights 3/10")
    assert (served.ask("/health").status, served.ask("/metrics").status) == (200, 200)
    refused = served.ask(COMPLETIONS, ENDLESS)
    assert refused.status == 503 and "weights 3/10" in refused.error()["message"]


def test_before_there_is_an_engine_only_probes_are_answered() -> None:
    from lockstep.launcher.serve.app import create_app
    from lockstep.launcher.serve.options import ServeOptions

    app = create_app(ServerState(ServeOptions()))

    def status(path: str, body: Any = None) -> int:
        return asyncio.run(ask(app, path, body)).status

    assert [status(path) for path in ("/health", "/load", "/metrics", "/version")] == [200] * 4
    assert [status(path) for path in ("/ready", "/v1/models")] == [503] * 2
    assert status(COMPLETIONS, ENDLESS) == status("/tokenize", {"prompt": "x"}) == 503
    assert status("/abort", {"request_id": "x"}) == 200
