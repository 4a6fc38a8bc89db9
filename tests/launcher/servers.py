"""A server as a process of its own, and clients of it over real sockets."""

import http.client
import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import launched
from launched import Launched

TESTS = Path(__file__).parent
RUN = "import sys; from lockstep.launcher.cli import main; sys.exit(main(sys.argv[1:]))"
PACKAGE = Path(launched.__file__).parents[2] / "deploy" / "package"


class Server(Launched):
    """``command`` with ``serve`` arguments; it must tell the address that it listens on."""

    def __init__(self, command: list[str], folder: Path, **env: str) -> None:
        folder.mkdir(exist_ok=True)
        paths = f"{PACKAGE}:{TESTS}"
        super().__init__(command, folder, PYTHONPATH=paths, OMP_NUM_THREADS="1", **env)

    @property
    def port(self) -> int:
        self.await_text("listening on")
        found = re.search(r"listening on http://[\d.]+:(\d+)", self.stderr)
        assert found is not None, self.stderr
        return int(found[1])

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of one call on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data)
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"null")
        finally:
            connection.close()

    def await_ready(self, timeout_s: float = 180) -> None:
        self.await_text(" is ready", timeout_s)
        assert self.ask("/ready")[0] == 200


class Stream(threading.Thread):
    """A client that reads one streamed completion, in a thread of its own."""

    def __init__(self, port: int, *, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.events: list[dict[str, Any]] = []
        self.done = False
        self._port = port
        self._body = {"prompt": "ab", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=180)
        connection.request("POST", "/v1/completions", json.dumps(self._body))
        for line in connection.getresponse():
            self.begun.set()
            if line.startswith(b"data: {"):
                self.events.append(json.loads(line[6:]))
            self.done = self.done or line == b"data: [DONE]\n"
        connection.close()

    @property
    def text(self) -> str:
        choices = [event["choices"][0] for event in self.events if "choices" in event]
        return "".join(choice["text"] for choice in choices)

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event["error"] for event in self.events if "error" in event]


def streams(server: Server, count: int, *, max_tokens: int) -> list[Stream]:
    """Streams that have all begun."""
    started = [Stream(server.port, max_tokens=max_tokens) for _ in range(count)]
    for each in started:
        assert each.begun.wait(120), server.stderr
    return started


def start_fake(folder: Path, kind: str, model: str, *flags: str) -> Server:
    """A server over the fake engine of ``serve_driver.py``."""
    driver = [sys.executable, "-P", str(TESTS / "serve_driver.py"), kind]
    arguments = ["serve", model, "--device", "cpu", "--host", "127.0.0.1", *flags]
    return Server([*driver, *arguments], folder)


def start_on_ray(folder: Path, model: str, *flags: str) -> Server:
    """A server of a tiny model with seeded random weights, eight lanes, its rank a Ray actor."""
    arguments = [
        "serve", model, "--served-model-name", "tiny", "--load-format", "dummy", "--device", "cpu",
        "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", "2000000",
        "--cudagraph-mode", "FULL_DECODE_ONLY", "--max-num-seqs", "8", *flags,
    ]  # fmt: skip
    return Server([sys.executable, "-P", "-c", RUN, *arguments], folder)
