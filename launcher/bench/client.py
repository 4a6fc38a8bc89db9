"""The requests of a run, over HTTP. aiohttp is an extra: it is loaded only here."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector

from lockstep.launcher.bench.options import BenchOptions
from lockstep.launcher.bench.records import RequestRecord
from lockstep.launcher.bench.stream import AnswerClock
from lockstep.launcher.errors import LaunchError
from lockstep.launcher.inputs import PromptInput

_POLL_S = 0.5
_SHOWN = 300
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Client:
    """Sends one prompt at a time, each on a connection of its own if need be."""

    def __init__(self, session: ClientSession, options: BenchOptions, model: str) -> None:
        self._session = session
        self._options = options
        self._url = options.server_url + _PATHS[options.endpoint]
        self._model = model

    async def send(self, prompt: PromptInput, run_start: float) -> RequestRecord:
        """Never raises for what the server does: that is in the record.

        Args:
            run_start: ``time.perf_counter()`` at the start of the run.
        """
        body = msgspec.json.encode(body_of(prompt, self._options, self._model))
        start = time.perf_counter()
        clock = AnswerClock(start)
        try:
            async with self._session.post(self._url, data=body) as response:
                if response.status != 200:
                    return _failed(start - run_start, await _refusal(response))
                async for data in response.content.iter_any():
                    clock.feed(data, time.perf_counter())
        except (ClientError, TimeoutError, ValueError, OSError) as error:
            return _failed(start - run_start, f"{type(error).__name__}: {error}".strip(": "))
        return clock.record(run_start)


@asynccontextmanager
async def connect(options: BenchOptions) -> AsyncIterator[Client]:
    """Wait until the server lists its models; asks for the first if none was named.

    Raises:
        LaunchError: it does not within ``ready_timeout``.
    """
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    async with ClientSession(
        connector=TCPConnector(limit=0),
        timeout=ClientTimeout(total=options.request_timeout),
        headers=headers,
    ) as session:
        name = await _first_model(session, options)
        yield Client(session, options, options.model or name)


def body_of(prompt: PromptInput, options: BenchOptions, model: str) -> dict[str, Any]:
    """What is asked; what the prompt sets itself comes last and wins."""
    if options.endpoint == "chat":
        messages = prompt.messages or [{"role": "user", "content": prompt.prompt}]
        asked: dict[str, Any] = {"messages": messages}
    else:
        asked = {"prompt": prompt.prompt if prompt.prompt is not None else prompt.prompt_token_ids}
    asked |= {"model": model, "temperature": options.temperature, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    if options.ignore_eos:
        asked["ignore_eos"] = True
    return asked | prompt.sampling


async def _first_model(session: ClientSession, options: BenchOptions) -> str:
    url, began = options.server_url + "/v1/models", time.monotonic()
    while True:
        try:
            async with session.get(url) as response:
                if response.status == 200:
                    return str((await response.json())["data"][0]["id"])
                reason = await _refusal(response)
        except (ClientError, TimeoutError, OSError) as error:
            reason = str(error)
        except (LookupError, TypeError, ValueError) as error:
            raise LaunchError(f"{url} is no list of models: {error!r}") from None
        if time.monotonic() - began > options.ready_timeout:
            raise LaunchError(f"{url} did not answer in {options.ready_timeout:g} s: {reason}")
        await asyncio.sleep(_POLL_S)


async def _refusal(response: ClientResponse) -> str:
    text = await response.text(errors="replace")
    return f"HTTP {response.status}: {' '.join(text.split())[:_SHOWN]}"


def _failed(start_s: float, error: str) -> RequestRecord:
    return RequestRecord(start_s=start_s, error=error)
