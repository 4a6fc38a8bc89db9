"""``lockstep bench serve`` against a server with known delays."""

import json
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import scripted_server
import uvicorn
from byte_model import write_byte_model
from fake_engine import FakeEngine
from scripted_server import BROKEN, FAILING, ITL_S, REFUSED, TTFT_S, ScriptedServer
from served import Served, serving

from lockstep.launcher.bench.arrivals import arrival_times
from lockstep.launcher.bench.load import run_load
from lockstep.launcher.bench.options import BenchOptions
from lockstep.launcher.bench.saved import load_run
from lockstep.launcher.cli import main

# A sleep is never shorter, and how much longer it gets says more of the machine.
LONGEST = 20


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    made = ScriptedServer(num_unready=1)
    with made.in_a_thread() as made.url:
        yield made


def test_latencies_are_the_servers(server: ScriptedServer) -> None:
    options = BenchOptions(base_url=f"{server.url}/v1/", num_prompts=8, input_len=5, output_len=6)
    summary = run_load(
        options,
        "run",
    ).summary
    assert (summary.num_completed, summary.num_failed) == (8, 0)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (40, 48)
    for found, least in ((summary.ttft_ms, TTFT_S), (summary.tpot_ms, ITL_S)):
        assert least * 1000 <= found.median <= least * 1000 * LONGEST
    assert ITL_S * 900 <= summary.itl_ms.median <= ITL_S * 1000 * LONGEST
    least_s = TTFT_S + 5 * ITL_S
    assert summary.duration_s >= least_s
    assert server.most_in_flight > 1
    assert summary.output_tokens_per_s == pytest.approx(48 / summary.duration_s)
    assert len(server.bodies) == 9  # with the warm-up, which is not counted


def test_what_is_asked(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    options = BenchOptions(
        base_url=server.url, num_prompts=1, num_warmups=0, input_len=3, output_len=2, vocab_size=1,
        ignore_eos=True, api_key="secret",
    )  # fmt: skip
    run_load(options, "run")
    assert server.bodies == [{
        "model": "scripted", "prompt": [0, 0, 0], "max_tokens": 2, "temperature": 0.0,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }]  # fmt: skip
    assert server.keys == ["Bearer secret"]


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_are_in_flight_than_allowed(server: ScriptedServer, limit: int) -> None:
    run_load(
        BenchOptions(
            base_url=server.url, num_prompts=7, output_len=1, max_concurrency=limit, num_warmups=0
        ),
        "run",
    )
    assert server.most_in_flight == limit


def test_arrivals_are_spread_as_asked(server: ScriptedServer) -> None:
    options = BenchOptions(
        base_url=server.url, num_prompts=12, output_len=1, request_rate=20.0, num_warmups=0
    )
    run = run_load(options, "run")
    late = [
        record.start_s - due
        for record, due in zip(run.requests, arrival_times(12, 20.0, 0), strict=True)
    ]
    assert min(late) >= 0.0
    assert sorted(late)[6] < 5.0


def test_chats(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    options = BenchOptions(
        base_url=server.url, endpoint="chat", prompts_file=str(tmp_path / "p.jsonl"),
        num_prompts=1, output_len=3, num_warmups=0, model="mine",
    )  # fmt: skip
    assert run_load(options, "run").summary.num_output_tokens == 3
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert server.bodies[0]["model"] == "mine"


@contextmanager
def over_http(served: Served) -> Iterator[str]:
    """Yields the URL of the application."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = uvicorn.Config(served.app, lifespan="off", log_config=None, ws="none")
        server = uvicorn.Server(config)
        serving = served.start(server.serve(sockets=[sock]))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = True
        serving.result(60)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_server_of_lockstep(tmp_path: Path, endpoint: str) -> None:
    """Each of its tokens is a frame that is counted; a frame that is none is not."""
    model = write_byte_model(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 4)
    engine = FakeEngine(lambda prompt_ids: [200, 201, 97] * 9, step_s=0.005)
    with serving(model, engine.start, max_num_seqs=4) as served, over_http(served) as url:
        options = BenchOptions(
            base_url=url, endpoint=endpoint, num_prompts=4, output_len=9, vocab_size=256,
            prompts_file=str(tmp_path / "p.jsonl") if endpoint == "chat" else None,
        )  # fmt: skip
        run = run_load(options, "run")
    assert [record.error for record in run.requests] == [""] * 4
    assert {record.num_output_tokens for record in run.requests} == {9}
    assert {len(record.itl_s) for record in run.requests} == {8}
    assert run.summary.tpot_ms.median >= 1.0


def test_failures_are_counted_named_and_left_out(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["good", REFUSED, BROKEN, FAILING]
    lines = [json.dumps({"prompt": prompt, "max_tokens": 2}) for prompt in prompts]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    argv = ["--base-url", server.url, "--prompts-file", str(tmp_path / "p.jsonl")]
    argv += ["--num-prompts", "4", "--output", str(tmp_path / "load.json")]
    assert main(["bench", "serve", *argv]) == 1
    out, err = capsys.readouterr()
    assert "failed requests" in out
    assert 'load: 1 failed: HTTP 429: {"error": {"message": "the queue is full"}}' in err
    assert "load: 1 failed: the stream broke off" in err
    assert 'load: 1 failed: the server sent an error: {"message": "a rank was lost"}' in err
    summary = load_run(tmp_path / "load.json").summary
    assert (summary.num_completed, summary.num_failed, summary.num_output_tokens) == (1, 3, 2)


def test_saved_runs_side_by_side(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    for file in files:
        argv = ["--base-url", server.url, "--num-prompts", "2", "--output-len", "2"]
        assert main(["bench", "serve", *argv, "--output", file]) == 0
    capsys.readouterr()
    assert main(["bench", "serve", "--compare", *files]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["a", "b", "ratio"]
    assert next(row for row in rows if row.startswith("completed")).split() == [
        "completed", "requests", "2", "2",
    ]  # fmt: skip


def test_latencies_are_drawn(server: ScriptedServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "runs.png"
    argv = ["--base-url", server.url, "--num-prompts", "2", "--output-len", "2"]
    assert main(["bench", "serve", *argv, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that runs the scripted server whatever module it is told to."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {scripted_server.__file__} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))


def test_three_modes_of_a_server_of_our_own(
    stand_in: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--modes", "my-model", "--serve-args=-tp 2", "--num-prompts", "2"]
    argv += ["--output-len", "2", "--output", str(tmp_path / "run.json")]
    assert main(["bench", "serve", *argv]) == 0
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if "told" in line]
    common = "-tp 2 --host 127.0.0.1 --port 0"
    assert told == [
        f"[{label}] lockstep: told -P -m lockstep serve my-model {flags} {common}"
        for label, flags in (
            ("eager", "--enforce-eager"),
            ("PIECEWISE", "--cudagraph-mode PIECEWISE"),
            ("FULL_AND_PIECEWISE", "--cudagraph-mode FULL_AND_PIECEWISE"),
        )
    ]
    assert err.count("lockstep: drained") == 3
    assert out.split()[:5] == ["eager", "PIECEWISE", "ratio", "FULL_AND_PIECEWISE", "ratio"]
    saved = [load_run(tmp_path / f"run.{label}.json") for label in out.split()[:4:3]]
    assert [run.label for run in saved] == ["eager", "FULL_AND_PIECEWISE"]


def test_a_server_of_our_own_that_does_not_start_is_told_at_once(
    stand_in: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--modes", "my-model", "--serve-args=--fail"]) == 1
    assert "the eager server ended with code 5 before it was ready" in capsys.readouterr().err


def test_without_a_server_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--base-url", "http://127.0.0.1:9", "--ready-timeout", "0.1"]
    assert main(["bench", "serve", *argv]) == 1
    assert "http://127.0.0.1:9/v1/models did not answer in 0.1 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "arguments are required: {serve,decode,prefill}"),
        (["sing"], "invalid choice: 'sing'"),
        (
            ["serve", "--base-url", "foo:80"],
            "--base-url must begin with http:// or https://, got foo",
        ),
        (["serve", "--num-prompts", "0"], "--num-prompts"),
        (["serve", "--serve-args", "x"], "--serve-args 'x' needs --modes"),
        (["serve", "--compare", "/nowhere.json"], "/nowhere.json: No such file"),
        (["serve", "--output", "/nowhere/a.json"], "--output /nowhere/a.json: its folder"),
        (["serve", "--plot", "a.jpg"], "--plot must be a file that ends in .png, got a.jpg"),
    ],
)
def test_a_bad_command_line_is_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
