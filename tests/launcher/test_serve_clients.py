"""Clients of the field against one server: a process of its own, its rank a Ray actor.

The model is tiny, with seeded random weights and a token for each byte. The last test kills the
rank. LOCKSTEP_SOAK_ROUNDS sets how many rounds of dropped clients there are (1).
"""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
from bench_readers import CHAT_READERS, COMPLETION_READERS, Report
from servers import Server, start_on_ray

from lockstep.launcher.serve.open_files import allow_many_files

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SOAK_ROUNDS = int(os.environ.get("LOCKSTEP_SOAK_ROUNDS", "1"))
DROPPED = 200
KEY = "sesame"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Server]:
    server = start_on_ray(tmp_path_factory.mktemp("server"), model, "--max-num-queued-reqs", "1500")
    try:
        server.await_ready(180)
        yield server
    finally:
        server.clean_up()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def answer(client: openai.OpenAI) -> str:
    """What a completion of "hello" must be."""
    done = client.completions.create(model="tiny", prompt="hello", **GREEDY)
    assert done.usage is not None and done.usage.completion_tokens == 12
    return done.choices[0].text


@pytest.fixture(scope="module")
def chat_answer(client: openai.OpenAI) -> str:
    messages: Any = [{"role": "user", "content": "hello"}]
    done = client.chat.completions.create(model="tiny", messages=messages, **GREEDY)
    assert done.choices[0].message.role == "assistant"
    return done.choices[0].message.content or ""


def test_openai_streams_what_it_answers_whole(
    client: openai.OpenAI, answer: str, chat_answer: str
) -> None:
    parts = client.completions.create(model="tiny", prompt="hello", stream=True, **GREEDY)
    assert "".join(part.choices[0].text for part in parts) == answer
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=messages, stream=True, logprobs=True, top_logprobs=2,
            stream_options={"include_usage": True}, **GREEDY,
        )
    )  # fmt: skip
    *parts_of_it, last = chunks
    assert "".join(c.choices[0].delta.content or "" for c in parts_of_it) == chat_answer
    assert last.usage is not None and last.usage.completion_tokens == 12
    first = parts_of_it[1].choices[0].logprobs
    assert first is not None and first.content is not None
    assert first.content[0].logprob == first.content[0].top_logprobs[0].logprob <= 0
    assert len(first.content[0].top_logprobs) == 2


def test_openai_async_with_several_streams_at_once(server: Server, answer: str) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        parts = await client.completions.create(
            model="tiny", prompt="hello", stream=True, n=2, **GREEDY
        )
        texts = ["", ""]
        async for part in parts:
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts[0] == texts[1]
        return texts[0]

    async def all_of_them() -> list[str]:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as client:
            return list(await asyncio.gather(*(one(client) for _ in range(8))))

    assert asyncio.run(all_of_them()) == [answer] * 8


def test_openai_knows_the_errors_and_the_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature must be") as caught:
        client.completions.create(model="tiny", prompt="x", temperature=1000)
    assert caught.value.param == "temperature"


def test_openai_seeds_make_answers_repeatable(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> list[str]:
        done = client.completions.create(model="tiny", prompt="x", n=2, seed=seed, max_tokens=20)
        return [choice.text for choice in done.choices]

    first = sampled(5)
    assert sampled(5) == first and first[0] != first[1]
    assert sampled(6)[0] == first[1], "choice i has seed + i"


class Trip(pydantic.BaseModel, extra="forbid"):
    city: Literal["Rome", "Z\u00fcrich"]
    days: Annotated[int, pydantic.Field(ge=1, le=30)]
    by_train: bool


def test_openai_parses_what_it_asked_for(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Where to?"}]
    done = client.chat.completions.parse(
        model="tiny", messages=messages, response_format=Trip, n=4, seed=1, temperature=1
    )
    trips = [choice.message.parsed for choice in done.choices]
    assert all(isinstance(trip, Trip) for trip in trips) and len(set(map(repr, trips))) > 1
    assert {choice.finish_reason for choice in done.choices} == {"stop"}
    schema: Any = {"name": "trip", "schema": Trip.model_json_schema()}
    chunks = client.chat.completions.create(
        model="tiny", messages=messages, seed=1, temperature=1, stream=True,
        response_format={"type": "json_schema", "json_schema": schema},
    )  # fmt: skip
    Trip.model_validate_json("".join(c.choices[0].delta.content or "" for c in chunks))


def test_openai_with_vllm_s_own_field(client: openai.OpenAI, answer: str) -> None:
    asked = {"structured_outputs": {"choice": ["yes", "no", "maybe"]}}
    done = client.completions.create(
        model="tiny", prompt=["hello"] * 3, temperature=1, extra_body=asked
    )
    assert all(choice.text in ("yes", "no", "maybe") for choice in done.choices)
    bad = {"structured_outputs": {"regex": "("}}
    with pytest.raises(openai.BadRequestError, match="structured_outputs: regex: ") as caught:
        client.completions.create(model="tiny", prompt="x", extra_body=bad)
    assert caught.value.param == "structured_outputs"
    done = client.completions.create(model="tiny", prompt="hello", **GREEDY)
    assert done.choices[0].text == answer


def test_curl(server: Server, answer: str) -> None:
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 12, "ignore_eos": True}

    def curl(*options: str, **more: Any) -> str:
        command = ["curl", "-sS", "-m", "60", url, *options, "-d", json.dumps(body | more)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert json.loads(curl())["choices"][0]["text"] == answer
    lines = curl("-N", stream=True).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-2]]
    assert "".join(texts) == answer


@pytest.mark.parametrize("reader", [*COMPLETION_READERS, *CHAT_READERS], ids=lambda r: r.__name__)
def test_what_benchmark_clients_read(
    server: Server, answer: str, chat_answer: str, reader: Any
) -> None:
    report: Report = reader(server.port, "hello", 12)
    if reader.__name__ == "llmperf_chat":
        # Its empty system prompt is part of the conversation.
        assert report.text and report.samples > 0
        return
    assert report.text == (answer if reader in COMPLETION_READERS else chat_answer)
    assert report.completion_tokens in (12, None)
    if reader.__name__.startswith(("vllm", "aiperf")):
        assert report.samples == 12, "an event a token"
    assert report.prompt_tokens in (None, 5, 7)


def run_alone(command: list[str], folder: Path) -> None:
    """A client that may have a Python of its own."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, env=env, cwd=folder, timeout=200)


@pytest.mark.skipif(shutil.which("guidellm") is None, reason="needs guidellm on PATH")
def test_guidellm_itself(server: Server, model: str, tmp_path: Path) -> None:
    target = f"http://127.0.0.1:{server.port}"
    command = [
        "guidellm", "run", "--disable-progress", "--profile", "kind=concurrent,streams=4",
        "--backend", f"kind=openai_http,target={target},model=tiny",
        "--tokenizer", f"kind=huggingface_auto,model={model}",
        "--data", "kind=synthetic_text,prompt_tokens=30,output_tokens=16",
        "--constraint", "kind=max_requests,count=20",
        "--output", f"kind=json,path={tmp_path / 'told.json'}",
    ]  # fmt: skip
    run_alone(command, tmp_path)
    (told,) = json.loads((tmp_path / "told.json").read_text())["benchmarks"]
    metrics = told["metrics"]
    assert metrics["request_totals"] == {
        "successful": 20, "errored": 0, "incomplete": 0, "total": 20,
    }  # fmt: skip
    assert metrics["output_token_count"]["successful"]["mean"] == 16


@pytest.mark.skipif(shutil.which("aiperf") is None, reason="needs aiperf on PATH")
def test_aiperf_itself(server: Server, model: str, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.port}"
    command = [
        "aiperf", "profile", "--model", "tiny", "--url", url, "--tokenizer", model,
        "--endpoint-type", "chat", "--streaming", "--concurrency", "4", "--request-count", "20",
        "--synthetic-input-tokens-mean", "40", "--output-tokens-mean", "16", "--ui", "none",
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count",
        "--output-artifact-dir", str(tmp_path),
    ]  # fmt: skip
    run_alone(command, tmp_path)
    told = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert told["error_summary"] == [] and told["completed_request_count"]["avg"] == 20
    assert told["output_sequence_length"]["avg"] == 16


async def streamed_text(port: int, request: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    lines = (await reader.read(-1)).decode().splitlines()
    writer.close()
    assert lines[0] == "HTTP/1.1 200 OK" and "data: [DONE]" in lines
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


def test_a_thousand_streams_at_once(server: Server, client: openai.OpenAI) -> None:
    allow_many_files()
    call = {"prompt": "hello", "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    whole = client.completions.create(model="tiny", prompt="hello", **GREEDY | {"max_tokens": 4})
    body = json.dumps(call | {"stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def all_of_them() -> list[str]:
        return list(
            await asyncio.gather(*(streamed_text(server.port, request) for _ in range(1000)))
        )

    assert asyncio.run(all_of_them()) == [whole.choices[0].text] * 1000


async def come_and_leave(port: int, rng: random.Random) -> None:
    """One client that closes its socket whatever the answer is."""
    body = json.dumps(
        {"prompt": "ab" * rng.randint(1, 40), "max_tokens": 400, "ignore_eos": True,
         "stream": rng.random() < 0.5, "n": rng.choice((1, 1, 3))}
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        await asyncio.wait_for(reader.read(-1), rng.uniform(0, 1.0))
    except TimeoutError:
        pass
    finally:
        writer.close()


def gauges(server: Server) -> dict[str, float]:
    connection = subprocess.run(
        ["curl", "-sS", f"http://127.0.0.1:{server.port}/metrics"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.findall(r"^lockstep_(\w+)\{.*\} ([\d.e+]+)$", connection.stdout, re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize("round_number", range(SOAK_ROUNDS))
def test_fault_84_clients_dropped_at_random(server: Server, round_number: int, answer: str) -> None:
    async def drop_all() -> None:
        rngs = [random.Random(1000 * round_number + index) for index in range(DROPPED)]
        await asyncio.gather(*(come_and_leave(server.port, rng) for rng in rngs))

    asyncio.run(drop_all())
    deadline = time.monotonic() + 60
    while True:
        now = gauges(server)
        at_rest = now["num_requests_running"] == now["num_requests_waiting"] == 0
        if at_rest and now["kv_blocks_free"] == now["kv_blocks"]:
            break
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
    assert server.ask("/load")[1]["server_load"] == 0


def test_fault_68_a_killed_rank_is_named_and_its_clients_may_retry(
    server: Server, client: openai.OpenAI
) -> None:
    (rank,) = [pid for pid, (line, _) in server.processes().items() if "WorkerActor" in line]
    parts = client.completions.create(
        model="tiny", prompt="x", max_tokens=450, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(parts))
    os.kill(rank, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(openai.APIError, match="rank 0"):
        list(parts)
    status, report = server.ask("/ready")
    assert time.monotonic() - killed < 60
    assert (status, report["status"]) == (503, "dead") and "rank 0" in report["reason"]
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=0).completions.create(model="tiny", prompt="x")
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
    server.root.send_signal(signal.SIGTERM)
    assert server.ended(120) == 4, "a later signal does not hide the failure"
    assert "rank 0" in server.stderr.splitlines()[-1] and "died" in server.stderr.splitlines()[-1]
