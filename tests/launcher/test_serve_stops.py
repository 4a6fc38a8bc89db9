"""A server at rest, and one whose scheduler or rank is killed or stopped. Ranks are real.

LOCKSTEP_SOAK_IDLE_S sets how long it rests (5); LOCKSTEP_SOAK_STOPS=1 runs all ways to stop.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from byte_model import write_byte_model
from open_streams import (
    cpu_seconds,
    longest_pauses,
    own_processes,
    pauses_text,
    scrape,
    wave,
)
from servers import Server, streams

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

IDLE_S = float(os.environ.get("LOCKSTEP_SOAK_IDLE_S", "5"))
RUN = "import sys; from lockstep.launcher.cli import main; sys.exit(main(sys.argv[1:]))"


class Stop(NamedTuple):
    actor: str
    number: signal.Signals
    name: str
    why: str


STOPS = [
    Stop("SchedulerActor", signal.SIGSTOP, "the scheduler", "hangs"),
    Stop("WorkerActor", signal.SIGSTOP, "rank 0", "hangs"),
    Stop("SchedulerActor", signal.SIGKILL, "the scheduler", "died"),
    Stop("WorkerActor", signal.SIGKILL, "rank 0", "died"),
]
ALL_STOPS = "LOCKSTEP_SOAK_STOPS" in os.environ
if not ALL_STOPS:
    del STOPS[1:]


@pytest.fixture(scope="module", params=STOPS, ids=lambda stop: f"{stop.actor}-{stop.number.name}")
def stop(request: pytest.FixtureRequest) -> Stop:
    return request.param


@pytest.fixture(scope="module")
def server(stop: Stop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_byte_model(tmp_path_factory.mktemp("model"))
    arguments = [
        "serve", model, "--load-format", "dummy", "--device", "cpu", "--host", "127.0.0.1",
        "--port", "0", "--kv-cache-memory-bytes", "2000000", "--max-num-seqs", "32",
        "--cudagraph-mode", "NONE",
    ]  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("server")
    server = Server([sys.executable, "-P", "-c", RUN, *arguments], folder, RAY_ADDRESS="")
    try:
        server.await_ready(180)
        yield server
    finally:
        server.clean_up()


def only_once(stop: Stop) -> None:
    if stop is not STOPS[0]:
        pytest.skip("one server is enough")


def test_fault_108_no_collection_stops_the_server(server: Server, stop: Stop) -> None:
    only_once(stop)
    assert wave(server.port, 300, 8).complete == 300
    told = scrape(server)
    print(pauses_text(told))  # noqa: T201
    pauses = longest_pauses(told)
    assert len(pauses) == 2 and max(pauses.values()) < 0.02, pauses


def test_fault_113_a_server_at_rest_stays_healthy_and_takes_no_time(
    server: Server, stop: Stop
) -> None:
    only_once(stop)
    time.sleep(1)
    pids = own_processes(server)
    assert {"front end", "SchedulerActor", "WorkerActor", "guard"} <= set(pids)
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    time.sleep(IDLE_S)
    shares = {name: (cpu_seconds(pid) - before[name]) / IDLE_S for name, pid in pids.items()}
    print({name: f"{100 * share:.2f} %" for name, share in shares.items()})  # noqa: T201
    assert max(shares.values()) < 0.05, shares
    assert server.ask("/ready")[0] == server.ask("/health")[0] == 200
    began = time.monotonic()
    assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    assert time.monotonic() - began < (5 if ALL_STOPS else 60)
    told = scrape(server)
    steps = told.total("lockstep_steps_total")
    assert told.one("lockstep_step_time_seconds_count") == steps > 20
    for part in ("plan", "commit", "launch"):
        assert told.one("lockstep_host_time_seconds_count", part=part) == steps
        assert told.one("lockstep_host_time_seconds_sum", part=part) > 0


def test_fault_98_what_stops_is_named_and_clients_may_retry(server: Server, stop: Stop) -> None:
    two = streams(server, 2, max_tokens=500)
    os.kill(own_processes(server)[stop.actor], stop.number)
    stopped = time.monotonic()
    while (answer := server.ask("/ready"))[0] == 200:
        assert time.monotonic() - stopped < (10 if ALL_STOPS else 60)
        time.sleep(0.1)
    assert answer[1]["status"] == "dead" and stop.name in answer[1]["reason"]
    status, body = server.ask("/v1/completions", {"prompt": "x"})
    assert status == 503 and stop.name in body["error"]["message"]
    for one in two:
        one.join(120)
        assert [error["code"] for error in one.errors] == [503] and one.done
        assert stop.name in one.errors[0]["message"]
    assert server.ended(120) == 4
    last = server.stderr.splitlines()[-1]
    assert last.startswith("lockstep: ") and stop.name in last and stop.why in last
