"""A span of OpenTelemetry for each request, where the server was told to send them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.launcher.errors import ConfigError
from lockstep.launcher.metrics.requests import Ended

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

OnEnd = Callable[[Ended], None]
_SERVICE = "lockstep"
# A collector that is gone holds up the end of the server for so long.
_TIMEOUT_S = 2


@contextmanager
def tracing(endpoint: str, model_name: str) -> Iterator[OnEnd]:
    """Gives what is to hear of each request that ends; spans go out in a thread of its own.

    Args:
        endpoint: where a collector takes spans by HTTP, such as ``http://host:4318/v1/traces``.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint {endpoint!r} needs 'lockstep-decode[traces]' installed: {error}"
        ) from error
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
    with exporting(exporter, model_name) as on_end:
        yield on_end


@contextmanager
def exporting(exporter: "SpanExporter", model_name: str) -> Iterator[OnEnd]:
    """The same with an exporter of one's own; at the end all spans have gone out."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": _SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer(_SERVICE)

    def on_end(ended: Ended) -> None:
        end_ns = time.time_ns()
        span = tracer.start_span("llm_request", start_time=end_ns - int(1e9 * ended.seconds))
        span.set_attributes(
            {
                "gen_ai.response.model": model_name,
                "gen_ai.usage.input_tokens": ended.num_prompt_tokens,
                "gen_ai.usage.output_tokens": ended.num_tokens,
                "gen_ai.response.finish_reasons": (ended.reason,),
                "lockstep.request_id": ended.req_id,
                "lockstep.engine": ended.dp_rank,
            }
        )
        if ended.first_token_s is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", ended.first_token_s)
        span.end(end_ns)

    try:
        yield on_end
    finally:
        provider.shutdown()
