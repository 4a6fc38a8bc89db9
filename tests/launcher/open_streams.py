"""Many streams at once against a server without a model, and what they cost it."""

import asyncio
import json
import os
import re
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from exposed import Exposed
from servers import TESTS, Server

_TICKS = os.sysconf("SC_CLK_TCK")
_PATIENCE_S = 300
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"


def start_noop(kind: str, folder: Path, model: str, *, streams: int, step_s: float = 0.0) -> Server:
    """A server of ``noop_driver.py`` with a lane for each stream."""
    driver = [sys.executable, "-P", str(TESTS / "noop_driver.py"), kind]
    arguments = [
        "serve", model, "--device", "cpu", "--load-format", "dummy", "--host", "127.0.0.1",
        "--port", "0", "--max-num-seqs", str(streams), "--cudagraph-mode", "NONE",
    ]  # fmt: skip
    env = {"RAY_ADDRESS": "", "NOOP_STEP_S": str(step_s)}
    return Server([*driver, *arguments], folder, **env)


@dataclass
class Streamed:
    """What a wave of streams received; complete are those with all tokens and the last event."""

    streams: int
    complete: int
    tokens: int
    seconds: float


def wave(port: int, streams: int, max_tokens: int) -> Streamed:
    """All streams open at once, each on a connection of its own."""
    return asyncio.run(_wave(port, streams, max_tokens))


async def _wave(port: int, streams: int, max_tokens: int) -> Streamed:
    body = {"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    payload, began = json.dumps(body).encode(), time.monotonic()
    calls = [asyncio.wait_for(_stream(port, payload), _PATIENCE_S) for _ in range(streams)]
    counts = [n for n in await asyncio.gather(*calls, return_exceptions=True) if isinstance(n, int)]
    seconds = time.monotonic() - began
    return Streamed(streams, counts.count(max_tokens), sum(counts), seconds)


async def _stream(port: int, payload: bytes) -> int:
    """Tokens received; none count without the last event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_HEAD + f"content-length: {len(payload)}\r\n\r\n".encode() + payload)
    answer = await reader.read(-1)
    writer.close()
    return answer.count(b'"text"') if b"data: [DONE]" in answer else 0


async def bad_clients(port: int, count: int) -> None:
    """Clients that leave at once or ask for what cannot be, by turns."""
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    for index in range(count):
        asked = body if index % 3 else body | {"temperature": -1}
        payload = json.dumps(asked).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_HEAD + f"content-length: {len(payload)}\r\n\r\n".encode() + payload)
        await writer.drain()
        writer.close()


def scrape(server: Server) -> Exposed:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
        return Exposed(answer.read().decode())


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def anonymous_bytes(pid: int) -> int:
    """Memory of its own. Rings are shared, and count page by page until they have gone round."""
    (line,) = re.findall(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(line) << 10


def longest_pauses(told: Exposed, clock: str = "cpu") -> dict[str, float]:
    """Seconds that a garbage collector has stopped front end and scheduler at most.

    By the clock ("wall") that is also what other processes took meanwhile.
    """
    found = told.find("lockstep_gc_longest_pause_seconds", clock=clock)
    return {each.labels["process"]: each.value for each in found}


def pauses_text(told: Exposed) -> str:
    """Of CPU time and by the clock, in milliseconds."""
    found = {clock: longest_pauses(told, clock) for clock in ("cpu", "wall")}
    texts = [
        f"{process} {1e3 * seconds:.1f} ({clock})"
        for clock, pauses in found.items()
        for process, seconds in pauses.items()
    ]
    return "longest pauses of the garbage collector, ms: " + ", ".join(texts)


def own_processes(server: Server) -> dict[str, int]:
    """Pids of front end, actors and guard by name; Ray's own processes are not among them."""
    found = {"front end": server.root.pid}
    for pid, (line, _) in server.processes().items():
        if "launcher/guard.py" in line:
            found["guard"] = pid
        for actor in ("SchedulerActor", "WorkerActor"):
            if f"ray::{actor}" in line:
                found[actor] = pid
    return found
