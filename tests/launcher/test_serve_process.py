"""The server as a process: signals, exit codes, the port. All servers run side by side.

Its engine is a fake one but without Ray.
"""

import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from byte_model import write_byte_model
from servers import Server, start_fake, streams
from stopped_ranks import RANK_STOPS, SOAK, front_end_stopped

pytestmark = pytest.mark.timeout(400)

Seen = dict[str, Any]


@contextmanager
def running(folder: Path, model: str, *flags: str, kind: str = "quick") -> Iterator[Server]:
    server = start_fake(folder, kind, model, "--port", "0", *flags)
    try:
        yield server
    finally:
        server.clean_up()


def drain(folder: Path, model: str) -> Seen:
    """SIGTERM while four streams run, and a fifth comes."""
    with running(folder, model, "--shutdown-timeout", "60") as server:
        server.await_ready()
        four = streams(server, 4, max_tokens=480)
        server.root.send_signal(signal.SIGTERM)
        began = time.monotonic()
        while server.ask("/ready")[0] == 200:
            assert time.monotonic() - began < 30
        seen = {
            "ready": server.ask("/ready"),
            "fifth": server.ask("/v1/completions", {"prompt": "x"}),
        }
        seen |= {"health": server.ask("/health")[0], "ongoing": not any(one.done for one in four)}
        for one in four:
            one.join(120)
        return seen | {"streams": four, "code": server.ended(), "log": server.stderr}


def run_out_of_time(folder: Path, model: str) -> Seen:
    with running(folder, model, "--shutdown-timeout", "0.5") as server:
        server.await_ready()
        two = streams(server, 2, max_tokens=500)
        began = time.monotonic()
        server.root.send_signal(signal.SIGTERM)
        seen = {"code": server.ended(), "seconds": time.monotonic() - began, "streams": two}
        return seen | {"log": server.stderr}


def second_signal(folder: Path, model: str) -> Seen:
    with running(folder, model) as server:
        server.await_ready()
        two = streams(server, 2, max_tokens=500)
        server.root.send_signal(signal.SIGINT)
        # One signal may come twice in a moment, to a group of processes and then passed on.
        server.root.send_signal(signal.SIGTERM)
        time.sleep(0.7)
        assert server.ask("/ready")[0] == 503
        began = time.monotonic()
        server.root.send_signal(signal.SIGTERM)
        seen = {"code": server.ended(), "seconds": time.monotonic() - began, "streams": two}
        return seen | {"log": server.stderr}


def while_loading(folder: Path, model: str) -> Seen:
    with running(folder, model, kind="slow") as server:
        server.await_text("weights ...")
        seen = {"ready": server.ask("/ready"), "health": server.ask("/health")[0]}
        seen["call"] = server.ask("/v1/completions", {"prompt": "x"})
        server.root.send_signal(signal.SIGTERM)
        return seen | {"code": server.ended(), "log": server.stderr}


def drain_under_torchrun(folder: Path, model: str) -> Seen:
    """The agent passes SIGTERM on to every rank. Two ranks, a real model."""
    agent = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    ranks = [*agent, "--nproc-per-node=2", "-m", "lockstep.launcher.torchrun"]
    flags = ["-tp", "2", "--load-format", "dummy", "--enforce-eager", "--port", "0"]
    small = ["--kv-cache-memory-bytes", "2000000", "--max-num-seqs", "4"]
    local = ["--device", "cpu", "--host", "127.0.0.1"]
    server = Server([*ranks, "serve", model, *flags, *small, *local], folder)
    try:
        server.await_ready()
        two = streams(server, 2, max_tokens=250)
        server.root.send_signal(signal.SIGTERM)
        return {"code": server.ended(120), "streams": two}
    finally:
        server.clean_up()


def port_taken(folder: Path, model: str) -> Seen:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with running(folder, model, "--port", port) as server:
            return {"port": port, "code": server.ended(120), "stderr": server.stderr}


CASES = (
    drain, run_out_of_time, second_signal, while_loading, drain_under_torchrun, port_taken,
    *RANK_STOPS, *([front_end_stopped] if SOAK else []),
)  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("servers")
    model = write_byte_model(tmp_path_factory.mktemp("model"))
    with ThreadPoolExecutor(len(CASES)) as pool:
        futures = {case: pool.submit(case, root / case.__name__, model) for case in CASES}
        return {case: future.result() for case, future in futures.items()}


def test_fault_102_running_requests_finish_and_new_ones_are_refused(seen: Any) -> None:
    drained = seen[drain]
    status, report = drained["ready"]
    assert (status, report["status"]) == (503, "draining") and drained["health"] == 200
    status, body = drained["fifth"]
    assert status == 503 and "shutting down" in body["error"]["message"]
    assert drained["ongoing"], "the answers had ended before the signal"
    assert [one.text for one in drained["streams"]] == ["ab" * 240] * 4
    assert all(one.done and not one.errors for one in drained["streams"])
    assert drained["code"] == 0


@pytest.mark.parametrize("case", [run_out_of_time, second_signal])
def test_what_may_not_finish_ends_with_one_error_and_in_time(seen: Any, case: Any) -> None:
    stopped = seen[case]
    assert stopped["code"] == 0 and stopped["seconds"] < 30
    for one in stopped["streams"]:
        assert [error["code"] for error in one.errors] == [503] and one.done
        assert 0 < len(one.text) < 500


@pytest.mark.parametrize(
    ("case", "began", "ended"),
    [
        (drain, "SIGTERM: .*; 4 may finish within 60 s", "4 ended"),
        (run_out_of_time, "SIGTERM: .*; 2 may .* 0.5 s", "0 ended, 2 aborted at the timeout"),
        (second_signal, "SIGINT: .*; 2 may .* 30 s", "0 ended, 2 aborted at a second signal"),
    ],
)
def test_the_log_tells_what_a_signal_leaves_and_what_comes_of_it(
    seen: Any, case: Any, began: str, ended: str
) -> None:
    end = rf"lockstep: {began}\nlockstep: drained in [\d.]+ s: {ended}\n$"
    assert re.search(end, seen[case]["log"]), seen[case]["log"]


def test_under_torchrun_running_requests_finish_too(seen: Any) -> None:
    stopped = seen[drain_under_torchrun]
    for one in stopped["streams"]:
        assert one.done and not one.errors
        assert one.events[-1]["choices"][0]["finish_reason"] == "length"
    assert stopped["code"] == 1, "torchrun's own, after any signal"


@pytest.mark.parametrize("case", RANK_STOPS)
def test_a_stopped_rank_without_ray_is_named_and_its_clients_may_retry(
    seen: Any, case: Any
) -> None:
    stopped = seen[case]
    told = f"rank {stopped['rank']} is lost: the writer (pid {stopped['pid']}) hangs: stopped"
    assert stopped["ready"]["status"] == "dead" and told in stopped["ready"]["reason"]
    assert stopped["seconds"] < (10 if SOAK else 60)
    for one in stopped["streams"]:
        assert [error["code"] for error in one.errors] == [503] and one.done
        assert told in one.errors[0]["message"]
    assert stopped["code"] == RANK_STOPS[case] and told in stopped["stderr"]


@pytest.mark.skipif(not SOAK, reason="part of make soak")
def test_a_stopped_front_end_without_ray_is_named_and_ended(seen: Any) -> None:
    stopped = seen[front_end_stopped]
    assert stopped["code"] == 4
    assert f"lockstep: the front end, pid {stopped['pid']}, hangs" in stopped["stderr"]


def test_while_loading_the_port_is_open_and_the_stage_is_told(seen: Any) -> None:
    loading = seen[while_loading]
    assert (loading["ready"][0], loading["ready"][1]["stage"]) == (503, "weights 3/10")
    assert loading["health"] == 200
    status, body = loading["call"]
    assert status == 503 and "weights" in body["error"]["message"]
    assert loading["code"] == 0
    assert loading["log"].endswith("lockstep: asked to stop while loading\n")


def test_a_taken_port_is_an_error_at_once(seen: Any) -> None:
    taken = seen[port_taken]
    assert taken["code"] == 2
    assert f"cannot listen on 127.0.0.1 port {taken['port']}" in taken["stderr"].splitlines()[-1]
