"""Many streams at once on a server of its own, on GPUs: is one lost, and how fast are they.

    python tests/bench_served.py --model tests/data/models/llama-3.1-8b --layouts "-tp 2" "-dp 2"

A benchmark, not a test; it needs nothing that a server does not. Each layout is a server with
random weights, started and ended here. All streams of a round open at once, each with a prompt of
its own. The exit code is 1 if a request got less than all of its tokens.
"""

import argparse
import asyncio
import json
import random
import shlex
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).parent / "launcher"))

from exposed import Exposed

from lockstep.launcher.bench.metrics import summarize
from lockstep.launcher.bench.own_server import own_server
from lockstep.launcher.bench.records import RequestRecord
from lockstep.launcher.bench.saved import Run
from lockstep.launcher.bench.stream import AnswerClock
from lockstep.launcher.bench.text import failures, run_table
from lockstep.launcher.consoles import open_console

VOCABULARY = 30_000
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
_LOOK_S = 0.25
_PATIENCE_S = 300.0


def main() -> int:
    args = _parse()
    runs = []
    for layout in args.layouts:
        run, most = measure(args, layout)
        lost = f"{run.summary.num_failed} of {len(run.requests)} requests lost"
        lines = [f"{layout}: {lost}, {most} ran at once", *failures(run)]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        open_console().print(run_table([run]))
        runs.append(run)
    return 1 if any(run.summary.num_failed for run in runs) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="directory with a config.json")
    parser.add_argument("--layouts", nargs="+", default=["-tp 2", "-dp 2"], help="flags of serve")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--serve-args", default="", help="more flags of serve, as one text")
    return parser.parse_args()


def measure(args: argparse.Namespace, layout: str) -> tuple[Run, int]:
    """All rounds on one server; and how many requests it ran at once at most."""
    argv = [args.model, "--load-format", "dummy", "--max-num-seqs", str(args.streams)]
    argv += ["--max-model-len", str(2 * (args.prompt + args.tokens))]
    argv += [*shlex.split(layout), *shlex.split(args.serve_args)]
    with own_server(layout, argv) as url:
        asyncio.run(_round(url, args, 0))
        return asyncio.run(_rounds(url, args, layout))


async def _rounds(url: str, args: argparse.Namespace, layout: str) -> tuple[Run, int]:
    watch = asyncio.create_task(_most_running(url, done := asyncio.Event()))
    records: list[RequestRecord] = []
    start, cpu_start = time.perf_counter(), time.process_time()
    for number in range(1, args.rounds + 1):
        records += await _round(url, args, number)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    done.set()
    summary = summarize(records, seconds, cpu_s)
    return Run(label=layout, options=vars(args), summary=summary, requests=records), await watch


async def _round(url: str, args: argparse.Namespace, number: int) -> list[RequestRecord]:
    draw, start = random.Random(number), time.perf_counter()
    prompts = [_ids(draw, args.prompt, args.vocabulary) for _ in range(args.streams)]
    return await asyncio.gather(*(_stream(url, ids, args.tokens, start) for ids in prompts))


def _ids(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


async def _stream(url: str, ids: Sequence[int], tokens: int, start: float) -> RequestRecord:
    """One answer, over a connection of its own; whatever is wrong with it is its error."""
    body = {"prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    payload = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
    clock = AnswerClock(time.perf_counter())
    try:
        await asyncio.wait_for(_read(url, payload.encode(), clock), _PATIENCE_S)
    except (OSError, TimeoutError, ValueError) as error:
        return RequestRecord(start_s=0.0, error=f"{type(error).__name__}: {error}")
    record = clock.record(start)
    if not record.error and record.num_output_tokens != tokens:
        return RequestRecord(start_s=0.0, error=f"{record.num_output_tokens} of {tokens} tokens")
    return record


async def _read(url: str, payload: bytes, clock: AnswerClock) -> None:
    """Raises ValueError for a status other than 200."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(_HEAD + f"content-length: {len(payload)}\r\n\r\n".encode() + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"{status!r}: {(await reader.read())[-300:]!r}")
        # Heads and sizes of chunks are no events, and are passed over as such.
        while data := await reader.read(1 << 16):
            clock.feed(data, time.perf_counter())
    finally:
        writer.close()


async def _most_running(url: str, done: asyncio.Event) -> int:
    most = 0
    while not done.is_set():
        told = await asyncio.to_thread(_scrape, url)
        most = max(most, round(told.total("lockstep_num_requests_running")))
        await asyncio.sleep(_LOOK_S)
    return most


def _scrape(url: str) -> Exposed:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        return Exposed(answer.read().decode())


if __name__ == "__main__":
    sys.exit(main())
