"""What the HTTP side of ``serve`` may be told, named as vLLM names it."""

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from lockstep.launcher.config import Count
from lockstep.launcher.metrics.exposition import MetricsCompat


def _help(text: str) -> Meta:
    return Meta(description=text)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the server in front of an engine.

    Raises:
        ValueError: settings that exclude each other or are out of range.
    """

    host: Annotated[str, _help("address to listen on")] = "0.0.0.0"
    port: Annotated[int, Meta(ge=0, le=65535), _help("0: any free one")] = 8000
    uds: Annotated[str | None, _help("path of a Unix socket to listen on instead")] = None
    root_path: Annotated[str, _help("path under which a proxy shows this server")] = ""
    api_key: Annotated[
        tuple[str, ...], _help("refuse requests without it (or LOCKSTEP_API_KEY); repeatable")
    ] = ()
    allow_credentials: Annotated[
        bool, _help("let pages of the allowed origins send credentials")
    ] = False
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    ssl_keyfile: Annotated[str | None, _help("serve HTTPS with this key")] = None
    ssl_certfile: Annotated[str | None, _help("and this certificate")] = None
    shutdown_timeout: Annotated[
        float, Meta(ge=0), _help("seconds that running requests get to finish after SIGTERM")
    ] = 30.0
    max_num_queued_tokens: Annotated[
        Count | None, _help("503 above so many tokens of prompts that wait")
    ] = None
    max_queue_seconds: Annotated[
        float | None, _help("503 for what has nothing of its answer after so long (never)")
    ] = None
    max_request_bytes: Annotated[
        int, Meta(ge=1), _help("largest body of a request; above it 413")
    ] = 32 << 20

    otlp_traces_endpoint: Annotated[
        str | None, _help("send a span for each request there, as OTLP over HTTP")
    ] = None
    metrics_compat: Annotated[
        MetricsCompat, _help("vllm: /metrics also has the names that gateways read of vLLM")
    ] = "none"

    def __post_init__(self) -> None:
        if "" in self.api_key:
            raise ValueError("api_key must not be empty")
        if self.uds == "":
            raise ValueError("uds must not be empty")
        seconds = self.max_queue_seconds
        if seconds is not None and not 0 < seconds < math.inf:
            raise ValueError(f"max_queue_seconds must be above 0 and finite, got {seconds}")
        traces = self.otlp_traces_endpoint
        if traces is not None and not traces.startswith(("http://", "https://")):
            raise ValueError(
                f"otlp_traces_endpoint must begin with http:// or https://, got {traces!r}"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile must be given together")
