"""``lockstep top``: numbers between two readings, and the table of a real exposition."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import NoReturn

import pytest

from lockstep.launcher.cli import INTERRUPTED, guarded
from lockstep.launcher.errors import LaunchError
from lockstep.launcher.metrics.exposition import ServerFacts, render
from lockstep.launcher.metrics.requests import RequestMetrics
from lockstep.launcher.top.command import _look
from lockstep.launcher.top.numbers import Window, engines
from lockstep.launcher.top.scrape import Scrape, metrics_url, read, scrape, start_of
from lockstep.launcher.top.view import COLUMNS
from lockstep.worker.schedule.histogram import empty_histogram
from lockstep.worker.schedule.stats import GraphUse, ReplicaStats, SchedulerStats
from lockstep.worker.schedule.step_times import no_step_times


def replica(running: int, held: int) -> ReplicaStats:
    return ReplicaStats(3, running, 100, 100 - held, 0, 1, 0, 0, 0, empty_histogram((1.0,)))


def use(dp_rank: int, mode: str, steps: int, real: int, padding: int) -> GraphUse:
    return GraphUse(
        run_mode=mode, num_tokens_padded=8, uniform_query_len=1, num_steps=steps, num_tokens=real,
        num_padding_tokens=padding, dp_rank=dp_rank,
    )  # fmt: skip


class Told:
    """A server of two engines whose counts a test moves on."""

    def __init__(self) -> None:
        self.requests = RequestMetrics()
        self.uses = [use(0, "FULL", 8, 8, 0), use(0, "EAGER", 2, 2, 2), use(1, "FULL", 1, 30, 10)]
        self.times = [no_step_times(0), no_step_times(1)]
        self.times[0].step.observe(0.0042)

    def answer(self, dp_rank: int, num_tokens: int, apart_s: float) -> None:
        clock, now = self.requests.accept("r", 10), time.monotonic() + 0.3
        for _ in range(num_tokens):
            clock.advance(dp_rank, 1, now)
            now += apart_s
        clock.finish("length", now)

    def text(self) -> str:
        stats = SchedulerStats(
            [replica(5, 20), replica(2, 60)], {}, 0, 0, {}, 0, 0, self.uses, step_times=self.times
        )
        facts = ServerFacts("m", 16, 100, 4, (0.0, 0.0))
        return render(facts, self.requests, stats, "vllm").decode()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def url(told: Told) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = told.text().encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_rates_and_shares_are_of_the_window(told: Told) -> None:
    told.answer(0, 50, 0.01)
    before = read(told.text(), 100.0)
    told.answer(0, 30, 0.01)
    told.answer(1, 5, 0.01)
    told.uses[0] = use(0, "FULL", 17, 20, 8)
    windows = dict(engines(before, read(told.text(), 110.0)))
    assert list(windows) == ["0", "1", "all"]
    assert windows["0"].rate("generation_tokens_total") == 3.0
    assert windows["1"].rate("generation_tokens_total") == 0.5
    assert windows["all"].rate("generation_tokens_total") == 3.5
    assert windows["all"].rate("prompt_tokens_total") == 2.0
    assert windows["0"].share("steps_total", run_mode="FULL") == 1.0
    assert windows["0"].share("step_tokens_total", kind="padding") == 0.4
    assert windows["1"].share("steps_total", run_mode="FULL") is None
    assert windows["all"].gauge("num_requests_running") == 7
    assert windows["all"].mean("kv_cache_usage_perc") == pytest.approx(0.4)


def test_quantiles_lie_in_the_bucket_of_the_window(told: Told) -> None:
    told.answer(0, 50, 3.0)
    before = read(told.text(), 100.0)
    told.answer(0, 99, 0.02)
    window = Window(before, read(told.text(), 101.0), {"engine": "0"})
    assert 0.01 < window.quantile("inter_token_latency_seconds", 0.5) <= 0.025
    assert window.quantile("time_to_first_token_seconds", 0.99) == pytest.approx(0.5, rel=0.02)
    assert Window(before, before, {}).quantile("inter_token_latency_seconds", 0.5) is None


def test_quantiles_are_those_of_evenly_filled_buckets() -> None:
    lines = ['x_bucket{le="1.0"} 10', 'x_bucket{le="2.0"} 30', 'x_bucket{le="+Inf"} 40']
    text = "# TYPE lockstep_x histogram\n" + "".join(f"lockstep_{line}\n" for line in lines)
    window = Window(Scrape(0.0, ()), read(text, 1.0), {})
    assert [window.quantile("x", q) for q in (0.125, 0.25, 0.5, 0.75, 0.9)] == [0.5, 1, 1.5, 2, 2]


def test_a_server_that_was_started_anew_counts_from_nothing(told: Told) -> None:
    told.answer(0, 50, 0.02)
    before, fresh = read(told.text(), 100.0), Told()
    fresh.answer(0, 5, 0.02)
    window = Window(before, read(fresh.text(), 110.0), {})
    assert window.rate("generation_tokens_total") == 0.5
    assert 0.01 < window.quantile("inter_token_latency_seconds", 0.5) <= 0.025


def test_once_prints_a_row_for_each_engine(
    told: Told, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told.answer(0, 50, 0.02)
    assert guarded(["top", url, "--once"], None) == 0
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("m, up ") and "ended: 1 length; refused 4, preempted 2;" in head
    assert titles.split()[0] == "engine" and len(rows) == 3
    cells = dict(zip(("engine", *(name for name, _ in COLUMNS)), rows[0].split(), strict=True))
    assert cells["engine"] == "0" and cells["running"] == "5" and cells["KV %"] == "20.0"
    assert cells["FULL %"] == "80.0" and cells["EAGER %"] == "20.0"
    assert cells["padding %"] == "16.7" and 4 <= float(cells["step p50"]) <= 6


def test_the_live_view_goes_on_when_nobody_answers(told: Told, url: str) -> None:
    recent = deque([start_of(scrape(url))])
    assert not isinstance(_look(url, recent), str) and len(recent) == 2
    assert "no answer" in str(_look("127.0.0.1:9", recent)) and len(recent) == 2


def test_an_interrupt_leaves_whole_lines(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.launcher.top.command._look", interrupted)
    assert guarded(["top", url, "--interval", "0.01"], None) == INTERRUPTED
    out, err = capsys.readouterr()
    rows = out.splitlines(keepends=True)
    assert [row.endswith("\n") for row in rows] == [True] * 5
    assert rows[-1].split()[0] == "all" and err == "lockstep: interrupted\n"


def test_a_wrong_address_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(["top", "127.0.0.1:9", "--once"], None) == LaunchError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: http://127.0.0.1:9/metrics: ")
    assert guarded(["top", "--interval", "0"], None) == 2


@pytest.mark.parametrize("given", ["h:1", "http://h:1/", "http://h:1/v1", "http://h:1/metrics"])
def test_any_address_of_a_server_will_do(given: str) -> None:
    assert metrics_url(given) == "http://h:1/metrics"
