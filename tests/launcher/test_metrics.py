"""What a server says of itself to Prometheus, against what its clients and its plans saw."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from byte_model import END
from exposed import Exposed
from fake_engine import FakeEngine
from inline_engine import start_inline_engine
from served import Served, Visit, ask, serving

from lockstep.launcher.metrics.requests import RequestClock, RequestMetrics
from lockstep.launcher.serve.options import ServeOptions
from lockstep.worker.schedule.histogram import empty_histogram

COMPLETIONS = "/v1/completions"
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def answer(prompt_ids: list[int]) -> list[int]:
    """The prompt again; one that begins with a semicolon ends with an end token."""
    return [*prompt_ids, END] if prompt_ids[0] == ord(";") - 33 else prompt_ids * 100


@pytest.fixture
def served(model: str) -> Any:
    engine = FakeEngine(answer, step_s=0.002, max_model_len=40)
    options = ServeOptions(metrics_compat="vllm")
    with serving(
        model, engine.start, options=options, served_model_name="m", max_num_seqs=4,
        max_num_queued_reqs=2,
    ) as served:  # fmt: skip
        yield served


def scrape(served: Served) -> Exposed:
    return Exposed(served.ask("/metrics").body.decode())


def usage(served: Served, **call: Any) -> int:
    return served.ask(COMPLETIONS, call).json()["usage"]["completion_tokens"]


def test_fault_101_every_request_is_counted_once_whatever_its_end(served: Served) -> None:
    sent = usage(served, prompt="abc", max_tokens=7, n=2)
    sent += usage(served, prompt=";", max_tokens=7)
    sent += usage(served, prompt="abc", max_tokens=30, stop="ca")
    assert served.ask(COMPLETIONS, {"prompt": "x", "max_tokens": -1}).status == 400
    assert served.ask(COMPLETIONS, {"prompt": ["x"] * 9}).status == 400
    assert served.ask(COMPLETIONS, {"prompt": "y" * 50, "max_tokens": 1}).status == 500
    left = served.ask(COMPLETIONS, {"prompt": "x", "stream": True}, visit=Visit(leave_after=3))
    told = scrape(served)
    reasons = told.by("lockstep_request_success_total", "finished_reason")
    assert reasons == {"length": 2, "stop": 2, "error": 1, "abort": 1}
    assert told.one("lockstep_request_accepted_total") == sum(reasons.values())
    assert told.one("lockstep_admission_rejections_total") == 1
    gone = told.total("lockstep_generation_tokens_total") - sent
    assert len(left.parts) <= gone <= len(left.parts) + 3
    assert told.total("lockstep_prompt_tokens_total") == 3 * 3 + 1 + 1
    assert told.total("lockstep_e2e_request_latency_seconds_count") == sum(reasons.values())
    assert told.total("lockstep_time_to_first_token_seconds_count") == 5


def test_times_are_those_of_the_engine(served: Served) -> None:
    usage(served, prompt="ab", max_tokens=20)
    told = scrape(served)
    count = told.total("lockstep_inter_token_latency_seconds_count")
    seconds = told.total("lockstep_inter_token_latency_seconds_sum")
    assert count == 19 and seconds >= 19 * 0.002
    assert told.total("lockstep_request_decode_time_seconds_sum") == pytest.approx(seconds)
    assert told.total("lockstep_e2e_request_latency_seconds_sum") >= 20 * 0.002
    mean = told.total("lockstep_request_time_per_output_token_seconds_sum")
    assert mean == pytest.approx(seconds / 19)


def test_gateway_names_have_the_same_values(served: Served, model: str) -> None:
    usage(served, prompt="ab", max_tokens=5)
    told = scrape(served)
    theirs = [each for each in told.samples if each.name.startswith("vllm:")]
    assert len({each.name for each in theirs}) > 20
    for sample in theirs:
        name = "lockstep_" + sample.name.removeprefix("vllm:")
        assert told.one(name, **sample.labels) == sample.value
    with serving(model, FakeEngine().start) as plain:
        assert not [each for each in scrape(plain).samples if ":" in each.name]


def test_counting_that_fails_disturbs_nobody(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(RequestClock, "advance", fail)
    assert usage(served, prompt="abc", max_tokens=7) == 7
    assert "while counting request" in caplog.text


def test_a_silent_scheduler_does_not_silence_the_rest(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise TimeoutError

    usage(served, prompt="abc", max_tokens=7)
    object.__setattr__(served.state.service, "stats", fail)
    told = scrape(served)
    assert told.total("lockstep_generation_tokens_total") == 7
    assert not told.find("lockstep_steps_total")


@pytest.fixture(scope="module")
def real(model: str) -> Any:
    """Scrapes of a scheduler and a worker in this process: before, during, after requests."""
    settings = {"load_format": "dummy", "max_num_seqs": 4, "kv_cache_memory_bytes": 40_000}
    with serving(model, start_inline_engine, served_model_name="m", **settings) as served:
        before = scrape(served)
        call = {"prompt": "abcd" * 10, "max_tokens": 60, "ignore_eos": True}

        async def run() -> list[Exposed]:
            calls = [asyncio.create_task(ask(served.app, COMPLETIONS, call)) for _ in range(6)]
            during = []
            while not all(each.done() for each in calls):
                reply = await ask(served.app, "/metrics")
                during.append(Exposed(reply.body.decode()))
                await asyncio.sleep(0.01)
            assert [each.result().status for each in calls] == [200] * 6
            return during

        during = served.run(run())
        yield before, during, scrape(served), served.engine.stats()


def test_gauges_show_what_runs_and_are_quiet_afterwards(real: Any) -> None:
    before, during, after, _ = real
    running = "lockstep_num_requests_running"
    assert max(each.one(running, engine="0") for each in during) == 4
    assert max(each.one("lockstep_num_requests_waiting") for each in during) >= 1
    assert max(each.one("lockstep_kv_cache_usage_perc") for each in during) > 0.1
    for quiet in (before, after):
        assert quiet.one(running) == quiet.one("lockstep_kv_cache_usage_perc") == 0
        assert quiet.one("lockstep_kv_blocks") == quiet.one("lockstep_kv_blocks_free") > 0


def test_steps_tokens_and_padding_are_those_of_the_scheduler(real: Any) -> None:
    _, _, after, stats = real
    assert after.by("lockstep_steps_total", "run_mode") == stats.steps_by_run_mode
    kinds = after.by("lockstep_step_tokens_total", "kind")
    assert kinds == {"real": stats.num_tokens, "padding": stats.num_padding_tokens}
    assert kinds["padding"] > 0
    assert after.one("lockstep_request_queue_time_seconds_count") == 6
    (replica,) = stats.replicas
    assert after.one("lockstep_num_preemptions_total") == replica.num_preemptions
    assert after.one("lockstep_prefix_cache_queries_total") == replica.num_looked_up_tokens >= 240
    assert after.one("lockstep_prefix_cache_hits_total") == replica.num_cached_tokens
    assert after.total("lockstep_generation_tokens_total", engine="0") == 6 * 60


def test_the_table_of_metrics_is_complete(real: Any) -> None:
    families = {each.name for each in real[2].families if each.name.startswith("lockstep_")}
    # An engine in this process has nobody who takes times.
    families |= {"lockstep_step_time_seconds", "lockstep_host_time_seconds"}
    rows = re.findall(r"^\| (`lockstep_[^|]+) \|", DOCS.read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(lockstep_\w+?)(?:_total)?`", row)}
    assert named == families


def test_observations_fall_at_or_below_their_bound() -> None:
    histogram = empty_histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1] and histogram.total == 103.5


def test_requests_are_counted_by_replica() -> None:
    metrics = RequestMetrics()
    for dp_rank in (1, 1, 0):
        clock = metrics.accept("r", 5)
        clock.advance(dp_rank, 1, 1e9)
        clock.finish("length", 1e9)
    metrics.accept("r", 5).finish("abort", 1e9)
    told = {rank: (t.prompt_tokens, dict(t.finished)) for rank, t in metrics.by_replica().items()}
    assert told == {
        -1: (0, {"abort": 1}), 0: (5, {"length": 1}), 1: (10, {"length": 2}),
    }  # fmt: skip
