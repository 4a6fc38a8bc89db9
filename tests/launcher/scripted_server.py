"""A server that speaks as much of OpenAI's API as a load generator hears, with known delays.

As a program it stands in for ``lockstep serve``: it says on standard error what that says.
"""

import asyncio
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

TTFT_S, ITL_S = 0.06, 0.03
REFUSED, BROKEN, FAILING = "refuse me", "break off", "fail"


class ScriptedServer:
    """Answers each prompt with ``max_tokens`` tokens; three prompts go wrong."""

    def __init__(self, *, num_unready: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_in_flight = self._in_flight = 0
        self._num_unready = num_unready

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()

    @contextmanager
    def in_a_thread(self) -> Iterator[str]:
        """Yields the URL."""
        url: list[str] = []
        loop, started = asyncio.new_event_loop(), threading.Event()
        ending = asyncio.Event()

        async def serve() -> None:
            async with self.listening() as found:
                url.append(found)
                started.set()
                await ending.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        started.wait(60)
        yield url[0]
        loop.call_soon_threadsafe(ending.set)
        thread.join(60)
        loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        if self._num_unready:
            self._num_unready -= 1
            return web.json_response({"error": {"message": "loading"}}, status=503)
        return web.json_response({"data": [{"id": "scripted"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if body.get("prompt") == REFUSED:
            return web.json_response({"error": {"message": "the queue is full"}}, status=429)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            return await self._stream(request, body)
        finally:
            self._in_flight -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        number = body["max_tokens"]
        for index in range(number):
            await asyncio.sleep(ITL_S if index else TTFT_S)
            await _send(response, _token(body, "length" if index == number - 1 else None))
            if body.get("prompt") == BROKEN:
                return response
        if body.get("prompt") == FAILING:
            await _send(response, {"error": {"message": "a rank was lost"}})
        usage = {"prompt_tokens": _num_tokens(body), "completion_tokens": number}
        await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


def _token(body: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    shown = {"text": "x"} if "prompt" in body else {"delta": {"content": "x"}}
    return {"choices": [{"index": 0, "finish_reason": finish_reason, **shown}]}


def _num_tokens(body: dict[str, Any]) -> int:
    return len(body["prompt"]) if "prompt" in body else len(body["messages"])


async def _send(response: web.StreamResponse, frame: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(frame).encode() + b"\n\n")


async def _main(argv: list[str]) -> None:
    print(f"lockstep: told {' '.join(argv)}", file=sys.stderr)  # noqa: T201
    if "--fail" in argv:
        raise SystemExit(5)
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    async with ScriptedServer().listening() as url:
        print(f"lockstep: listening on {url}", file=sys.stderr)  # noqa: T201
        print("lockstep: scripted is ready", file=sys.stderr, flush=True)  # noqa: T201
        await ending.wait()
    print("lockstep: drained", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
