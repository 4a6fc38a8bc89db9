"""Spans of requests, as a collector receives them over HTTP."""

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lockstep.launcher.errors import ConfigError
from lockstep.launcher.metrics.requests import RequestMetrics
from lockstep.launcher.metrics.traces import tracing


class Collector(HTTPServer):
    """Keeps the bodies it is sent, decompressed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[bytes] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def spans(self) -> list:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        scopes = [s for r in requests for each in r.resource_spans for s in each.scope_spans]
        return [span for scope in scopes for span in scope.spans]


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_each_request_that_ends_is_a_span(collector: Collector) -> None:
    began = time.time_ns()
    with tracing(collector.endpoint, "tiny") as on_end:
        metrics = RequestMetrics(on_end)
        clock, now = metrics.accept("cmpl-1", 5), time.monotonic() + 0.25
        clock.advance(1, 3, now)
        clock.finish("length", now + 0.75)
        metrics.accept("cmpl-2", 9).finish("abort", now)
    whole, early = collector.spans()
    told = {each.key: each.value for each in whole.attributes}
    assert whole.name == "llm_request" and not whole.parent_span_id
    assert whole.end_time_unix_nano - whole.start_time_unix_nano == pytest.approx(1e9, rel=0.05)
    assert abs(whole.end_time_unix_nano - began) < 60e9
    assert told["gen_ai.usage.input_tokens"].int_value == 5
    assert told["gen_ai.usage.output_tokens"].int_value == 3
    assert told["gen_ai.latency.time_to_first_token"].double_value == pytest.approx(0.25, rel=0.05)
    assert told["lockstep.engine"].int_value == 1
    assert told["lockstep.request_id"].string_value == "cmpl-1"
    assert told["gen_ai.response.model"].string_value == "tiny"
    (reason,) = told["gen_ai.response.finish_reasons"].array_value.values
    assert reason.string_value == "length"
    assert "gen_ai.latency.time_to_first_token" not in {each.key for each in early.attributes}


def test_a_collector_that_is_gone_disturbs_nobody() -> None:
    with tracing("http://127.0.0.1:9/v1/traces", "tiny") as on_end:
        RequestMetrics(on_end).accept("cmpl-1", 5).finish("abort", time.monotonic())
        began = time.monotonic()
    assert time.monotonic() - began < 30


def test_without_the_extra_it_is_a_setting_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with (
        pytest.raises(ConfigError, match=r"otlp_traces_endpoint 'http://x' needs .*\[traces\]"),
        tracing("http://x", "tiny"),
    ):
        pass
