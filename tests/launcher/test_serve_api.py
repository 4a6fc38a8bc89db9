"""What calls get back, over an engine that repeats the prompt: one token a byte."""

from typing import Any

import pytest
from byte_model import END, VOCAB, byte_tokenizer, write_byte_model
from fake_engine import FakeEngine
from served import Reply, Served, Visit, serving

from lockstep.comm.messages import unpack_ids
from lockstep.launcher.serve.options import ServeOptions

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SMILE = "\U0001f600"


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text).ids
    return ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_byte_model(tmp_path_factory.mktemp("model"), temperature=0.5, top_p=0.9)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def served(model: str, engine: FakeEngine) -> Any:
    options = ServeOptions(max_request_bytes=20_000)
    with serving(model, engine.start, options=options, served_model_name="tiny") as served:
        yield served


def say(text: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def test_a_completion_has_openais_shape(served: Served) -> None:
    reply = served.ask(COMPLETIONS, {"model": "tiny", "prompt": "hello", "max_tokens": 9})
    body = reply.json()
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    assert body.pop("id").startswith("cmpl-") and body.pop("created") > 1_700_000_000
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_chat_completion_has_openais_shape(served: Served) -> None:
    body = served.ask(CHAT, say("hello", model="tiny")).json()
    assert body.pop("id").startswith("chatcmpl-") and body.pop("created") > 1_700_000_000
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "[hello]"},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert body["usage"]["completion_tokens"] == body["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        (ids_of("ids"), ["ids"]),
        ([ids_of("a"), ids_of("bc")], ["a", "bc"]),
    ],
)
def test_every_form_of_prompt(served: Served, prompt: Any, texts: list[str]) -> None:
    body = served.ask(COMPLETIONS, {"prompt": prompt}).json()
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, texts))


def test_n_choices_of_each_prompt_and_a_prompt_counted_once(
    served: Served, engine: FakeEngine
) -> None:
    body = served.ask(COMPLETIONS, {"prompt": ["a", "bc"], "n": 2, "seed": 2**63 - 1}).json()
    assert [choice["text"] for choice in body["choices"]] == ["a", "a", "bc", "bc"]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 6
    assert [add.sampling.seed for add in engine.added] == [2**63 - 1, -(2**63)] * 2


def test_echo_puts_the_prompt_before_the_answer(served: Served) -> None:
    call = {"prompt": ["ab", "cd"], "n": 2, "echo": True, "max_tokens": 1}
    whole = [choice["text"] for choice in served.ask(COMPLETIONS, call).json()["choices"]]
    assert whole == ["aba", "aba", "cdc", "cdc"]
    streamed = served.ask(COMPLETIONS, call | {"stream": True})
    assert ["".join(streamed.texts(index)) for index in range(4)] == whole
    ids = served.ask(COMPLETIONS, call | {"prompt": ids_of("ab"), "n": 1}).json()
    assert ids["choices"][0]["text"] == "aba"


def test_messages_may_be_lists_of_parts(served: Served) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = served.ask(CHAT, say(parts)).json()
    assert body["choices"][0]["message"]["content"] == "[hello]"


def test_defaults_are_the_models_and_each_apis_own(served: Served, engine: FakeEngine) -> None:
    served.ask(COMPLETIONS, {"prompt": "x", "stop": None, "temperature": None})
    served.ask(CHAT, say("x", max_completion_tokens=3, top_p=0.25))
    served.ask(CHAT, say("x"))
    first, second, third = (add.sampling for add in engine.added)
    assert (first.temperature, first.top_p, first.max_tokens) == (0.5, 0.9, 16)
    assert (second.temperature, second.top_p, second.max_tokens) == (0.5, 0.25, 3)
    assert third.max_tokens is None


def test_every_sampling_parameter_reaches_the_engine(served: Served, engine: FakeEngine) -> None:
    asked = {
        "temperature": 0.7, "top_p": 0.8, "top_k": 5, "min_p": 0.1, "seed": 7, "max_tokens": 9,
        "min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.1, "stop": ["##"], "stop_token_ids": [3],
        "include_stop_str_in_output": True, "logprobs": 4,
    }  # fmt: skip
    more = {"logit_bias": {"42": -1.5}, "ignore_eos": True, "user": "me", "best_of": 1}
    assert served.ask(COMPLETIONS, {"prompt": "x", **asked, **more}).status == 200
    (add,) = engine.added
    for name, value in asked.items():
        assert getattr(add.sampling, name) == (tuple(value) if isinstance(value, list) else value)
    assert add.sampling.logit_bias == {42: -1.5}
    assert unpack_ids(add.stop_ids) == [3]
    served.ask(COMPLETIONS, {"prompt": "x"})
    assert unpack_ids(engine.added[1].stop_ids) == [END]


@pytest.mark.parametrize("tokens_per_poll", [1, 3, 100])
@pytest.mark.parametrize("stop", ["<STOP>", ["<STOP>", "D"], ["never", "TOP"]])
def test_a_stream_is_the_whole_answer_however_it_is_cut(
    model: str, tokens_per_poll: int, stop: Any
) -> None:
    engine = FakeEngine(tokens_per_poll=tokens_per_poll)
    call = {"prompt": f"a{SMILE}b<ST<STOP>cD", "stop": stop, "max_tokens": 50}
    with serving(model, engine.start) as served:
        whole = served.ask(COMPLETIONS, call).json()
        streamed = served.ask(COMPLETIONS, call | {"stream": True})
    (choice,) = whole["choices"]
    assert choice["text"] == f"a{SMILE}b<ST" + ("<S" if "never" in stop else "")
    assert choice["finish_reason"] == "stop"
    assert "".join(streamed.texts()) == choice["text"]
    assert all("\ufffd" not in text for text in streamed.texts())
    reasons = [event["choices"][0]["finish_reason"] for event in streamed.events()]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


def test_a_stream_has_a_chunk_a_token_and_no_usage_unasked(served: Served) -> None:
    reply = served.ask(COMPLETIONS, {"prompt": f"a{SMILE}b", "stream": True, "model": "tiny"})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.texts() == ["a", "", "", "", SMILE, "b"]
    (head,) = {(e["id"], e["object"], e["created"], e["model"]) for e in reply.events()}
    assert head[0].startswith("cmpl-") and head[1] == "text_completion" and head[3] == "tiny"
    assert all("usage" not in event for event in reply.events())


def test_a_chat_stream_begins_with_the_role(served: Served) -> None:
    reply = served.ask(CHAT, say("ab", stream=True, n=2))
    deltas = [event["choices"][0]["delta"] for event in reply.events()]
    assert deltas[:2] == [{"role": "assistant", "content": ""}] * 2
    assert all(set(delta) == {"content"} for delta in deltas[2:])
    assert {event["object"] for event in reply.events()} == {"chat.completion.chunk"}
    assert "".join(reply.texts(0)) == "".join(reply.texts(1)) == "[ab]"


def test_usage_at_the_end_or_in_every_chunk(served: Served) -> None:
    call = {"prompt": "abc", "stream": True}
    last = served.ask(COMPLETIONS, call | {"stream_options": {"include_usage": True}}).events()
    assert [event.get("usage") for event in last[:-1]] == [None] * 3
    assert last[-1]["choices"] == [] and last[-1]["usage"]["total_tokens"] == 6
    options = {"include_usage": True, "continuous_usage_stats": True}
    for pause_s in (0.0, 0.01):
        visit = Visit(pause_s=pause_s)
        every = served.ask(COMPLETIONS, call | {"stream_options": options}, visit=visit).events()
        assert [event["usage"]["completion_tokens"] for event in every] == [1, 2, 3, 3]


def test_logprobs_of_completions(served: Served) -> None:
    call = {"prompt": "hé", "logprobs": 1}
    whole = served.ask(COMPLETIONS, call).json()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["h", "\ufffd", "\ufffd"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"h": -0.5}, {"\ufffd": -0.5}, {"\ufffd": -0.5}],
        "text_offset": [0, 1, 1],
    }
    events = served.ask(COMPLETIONS, call | {"stream": True}).events()
    parts = [event["choices"][0]["logprobs"] for event in events]
    for name, values in whole.items():
        assert [value for part in parts for value in part[name]] == values


@pytest.mark.parametrize(
    ("call", "text", "offsets"),
    [
        ({"prompt": f"{SMILE}{SMILE}a"}, f"{SMILE}{SMILE}a", [0, 0, 0, 0, 1, 1, 1, 1, 2]),
        ({"prompt": [*ids_of("a"), END, *ids_of("b")], "ignore_eos": True}, "ab", [0, 1, 1]),
        ({"prompt": "a\nb", "stop": "\n\n"}, "a\nb", [0, 1, 2]),
        ({"prompt": "a<Sb<STOP>c", "stop": "<STOP>"}, "a<Sb", [0, 1, 1, 3, *[4] * 6]),
    ],
    ids=["characters of several tokens", "an end token", "held back", "a stop string"],
)
def test_offsets_of_tokens_are_places_of_the_text(
    served: Served, call: dict[str, Any], text: str, offsets: list[int]
) -> None:
    call = call | {"logprobs": 0}
    (whole,) = served.ask(COMPLETIONS, call).json()["choices"]
    assert (whole["text"], whole["logprobs"]["text_offset"]) == (text, offsets)
    events = served.ask(COMPLETIONS, call | {"stream": True}).events()
    parts = [event["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert parts == [[offset] for offset in offsets]


def test_logprobs_of_chat(served: Served) -> None:
    call = say("h", logprobs=True, top_logprobs=1)
    whole = served.ask(CHAT, call).json()["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in whole] == ["[", "h", "]"]
    assert whole[1] == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [{"token": "h", "logprob": -0.5, "bytes": [104]}],
    }
    halves = served.ask(CHAT, call | say(SMILE)).json()["choices"][0]["logprobs"]["content"][1:-1]
    assert {half["token"] for half in halves} == {"\ufffd"}
    assert bytes(byte for half in halves for byte in half["bytes"]) == SMILE.encode()
    events = served.ask(CHAT, call | {"stream": True}).events()[1:]
    assert [event["choices"][0]["logprobs"]["content"] for event in events] == [[w] for w in whole]


@pytest.mark.parametrize(
    ("path", "call", "param"),
    [
        (COMPLETIONS, {"prompt": "x " * 4096}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 4096}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "guided_json": {}}, "guided_json"),
        (CHAT, say("x", guided_json_object=False), "guided_json_object"),
        (COMPLETIONS, {"prompt": "x", "guided_decoding_backend": "a"}, "guided_decoding_backend"),
        (CHAT, say("x", **{"guided_\ud800": 1}), r"guided_\ud800"),
        (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "x", "n": 129}, "n"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 17}, "min_tokens"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "stream_options"),
        (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", [1]]}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": "a\ud800"}, "prompt"),
        (COMPLETIONS, {}, None),
        (CHAT, {}, None),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, say("a\ud800"), "messages"),
        (CHAT, say("x", tools=[{"type": "function"}]), "tools"),
        (CHAT, say("x", response_format={"type": "xml"}), "response_format"),
        (CHAT, say("x", top_logprobs=1), "top_logprobs"),
        (CHAT, say("x", chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
        (CHAT, say("x", bad_words=["a"]), "bad_words"),
        (CHAT, say("x", chat_template="x"), "chat_template"),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [5]}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": "x", "repetition_penalty": 1e-40}, "repetition_penalty"),
        (CHAT, say("x", logprobs=True, top_logprobs=21), "top_logprobs"),
        (CHAT, say([{"type": "image_url"}]), "messages"),
        (CHAT, say("x", max_completion_tokens=0), "max_tokens"),
    ],
)
def test_what_cannot_be_done_is_400_with_its_field(
    served: Served, engine: FakeEngine, path: str, call: dict[str, Any], param: str | None
) -> None:
    error = served.ask(path, call)
    assert error.status == 400, error.body
    assert error.error()["param"] == param and error.error()["message"]
    assert engine.added == []


@pytest.mark.parametrize(
    ("path", "call", "message"),
    [
        (COMPLETIONS, {"prompt": [1, VOCAB]}, f"prompt[1] must be in [0, {VOCAB}), got {VOCAB}"),
        (COMPLETIONS, {"prompt": [[1], [-1]]}, f"prompt[1][0] must be in [0, {VOCAB}), got -1"),
        (
            COMPLETIONS,
            {"prompt": "x", "logit_bias": {str(VOCAB): 1}},
            f"logit_bias: its token ids must be in [0, {VOCAB}), got {VOCAB}",
        ),
        (
            CHAT,
            say([{"text": "x"}, {"type": "image_url"}]),
            'messages[0].content[1]: a part {"type": "text", "text": ...} is needed',
        ),
    ],
)
def test_what_is_wrong_is_named_as_the_client_sent_it(
    served: Served, path: str, call: dict[str, Any], message: str
) -> None:
    error = served.ask(path, call).error()
    assert error["message"] == message and message.startswith(error["param"])


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**31, 2**63, True, 1.5, "7", None])
def test_fault_77_ids_outside_the_vocabulary(served: Served, token_id: Any) -> None:
    for prompt in ([1, token_id], [[1, token_id]]):
        assert served.ask(COMPLETIONS, {"prompt": prompt}).status == 400
    assert served.ask(COMPLETIONS, {"prompt": [1, 2]}).status == 200


SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias",
)  # fmt: skip


@pytest.mark.parametrize("field", SAMPLING)
def test_fault_78_sampling_values(served: Served, field: str) -> None:
    form = '{"5": %s}' if field == "logit_bias" else "%s"
    for value in ("NaN", "Infinity", "-Infinity", '"nan"', "1e308", "-300", "[]", "true"):
        body = f'{{"prompt": "x", "{field}": {form % value}}}'
        reply = served.ask(COMPLETIONS, body.encode())
        assert reply.status == 400 and reply.error()["param"] == field, (value, reply.body)
    assert served.ask(COMPLETIONS, {"prompt": "x", field: None}).status == 200


def test_fault_76_a_prompt_one_token_too_long(served: Served) -> None:
    for length, status in ((511, 200), (512, 400), (513, 400), (5120, 400)):
        reply = served.ask(COMPLETIONS, {"prompt": "x" * length})
        assert reply.status == status
        assert status == 200 or "max_model_len 512" in reply.error()["message"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, b"", 400),
        (COMPLETIONS, b"{", 400),
        (COMPLETIONS, b"[1]", 400),
        (COMPLETIONS, b"[" * 10_000, 400),
        (COMPLETIONS, b"\xff\xfe", 400),
        (COMPLETIONS, {"prompt": "x" * 20_001}, 413),
        (COMPLETIONS, {"prompt": "x", "model": "other"}, 404),
        (CHAT, say("x", model="other"), 404),
        ("/v1/models/other", None, 404),
        ("/v1/embeddings", {}, 404),
        ("/v1/completions", None, 405),
    ],
)
def test_bad_calls_have_their_status(served: Served, path: str, body: Any, status: int) -> None:
    reply = served.ask(path, body)
    assert reply.status == status
    assert reply.error()["message"]


def test_the_model_is_listed_with_root_and_length(served: Served, model: str) -> None:
    (card,) = served.ask("/v1/models").json()["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", model, 512)
    assert served.ask("/v1/models/tiny").json() == card


def test_text_to_ids_and_back(served: Served) -> None:
    ids = served.ask("/tokenize", {"prompt": "hello"}).json()
    assert ids == {"count": 5, "max_model_len": 512, "tokens": ids_of("hello")}
    assert served.ask("/tokenize", say("hello")).json()["tokens"] == ids_of("[hello]")
    assert served.ask("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": "hello"}
    rendered = served.ask("/tokenize", say("a</s>")).json()["tokens"]
    assert rendered == [*ids_of("[a"), END, *ids_of("]")]
    assert served.ask("/detokenize", {"tokens": rendered}).json() == {"prompt": "[a</s>]"}
    assert served.ask("/detokenize", {"tokens": [VOCAB]}).error()["param"] == "tokens"


def test_every_name_of_a_model_is_listed_and_taken_and_answers_have_the_first(model: str) -> None:
    names = ("first", "org/second")
    with serving(model, FakeEngine().start, served_model_name=names) as served:
        cards = served.ask("/v1/models").json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [(name, model) for name in names]
        assert served.ask("/v1/models/org/second").json() == cards[1]
        for name in names:
            asked = {"model": name, "prompt": "x", "max_tokens": 1}
            assert served.ask(COMPLETIONS, asked).json()["model"] == "first"
        refused = served.ask(COMPLETIONS, {"model": model, "prompt": "x"})
        assert refused.status == 404 and "'first' or 'org/second'" in refused.error()["message"]
        assert b'model_name="first"' in served.ask("/metrics").body


def test_a_key_is_needed_where_one_is_set(model: str) -> None:
    options = ServeOptions(api_key=("one", "two"))
    call = {"prompt": "x"}

    def status(reply: Reply) -> int:
        return reply.status

    with serving(model, FakeEngine().start, options=options) as served:
        assert served.ask(COMPLETIONS, call).error()["type"] == "authentication_error"
        for given in ("Bearer three", "Bearer ", "two", "Basic two", "Bearer tw\u00f6"):
            refused = served.ask(COMPLETIONS, call, {"authorization": given})
            assert status(refused) == 401 and refused.headers["www-authenticate"] == "Bearer"
        assert status(served.ask(COMPLETIONS, call, {"authorization": "Bearer two"})) == 200
        assert status(served.ask("/abort", {"request_id": "x"})) == 401
        assert status(served.ask("/ready")) == status(served.ask("/metrics")) == 200


def test_small_answers_about_the_server(served: Served) -> None:
    assert served.ask("/ready").json()["status"] == "ready"
    assert (served.ask("/health").status, served.ask("/health").body) == (200, b"")
    assert served.ask("/ping").status == 200
    assert set(served.ask("/version").json()) == {"version"}
    assert served.ask("/load").json()["server_load"] == 0
    served.ask(COMPLETIONS, {"prompt": "abc"})
    text = served.ask("/metrics").body.decode()
    assert 'lockstep_generation_tokens_total{engine="",model_name="tiny"} 3.0' in text
    ended = '{engine="",finished_reason="length",model_name="tiny"}'
    assert f"lockstep_request_success_total{ended} 1.0" in text
