"""What the host side of a server costs, with ranks that compute nothing. Not collected by pytest.

    python tests/bench_front_end.py [--streams 1000] [--step-ms 100] [--tokens 16 144]

Two waves of that many streams, all open at once: short answers, then long ones. Their difference
is what a token costs, the rest what a request costs. CPU microseconds of whole processes: the
front end (HTTP, tokenizer, text; its work for Ray), the scheduler's actor (plan, commit, messages;
its work for Ray), a rank that answers after ``--step-ms``.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "launcher"))

from byte_model import write_byte_model
from open_streams import (
    Streamed,
    anonymous_bytes,
    cpu_seconds,
    own_processes,
    pauses_text,
    scrape,
    start_noop,
    wave,
)
from servers import Server

NAMES = {"front end": "front end", "SchedulerActor": "scheduler", "WorkerActor": "rank"}


def measured(
    server: Server, pids: dict[str, int], streams: int, tokens: int
) -> tuple[Streamed, dict[str, float]]:
    """A wave, and CPU seconds of each process for it."""
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    streamed = wave(server.port, streams, tokens)
    return streamed, {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}


def report(server: Server, streams: int, tokens: list[int]) -> str:
    found = own_processes(server)
    pids = {name: found[key] for key, name in NAMES.items()}
    wave(server.port, streams, tokens[0])
    (short, low), (long, high) = (measured(server, pids, streams, each) for each in tokens)
    lines = []
    for name, pid in pids.items():
        per_token = (high[name] - low[name]) / (long.tokens - short.tokens)
        per_request = low[name] / streams - per_token * tokens[0]
        lines.append(
            f"{name:10} {1e6 * per_token:6.1f} us a token, {1e6 * per_request:6.0f} us a request, "
            f"{anonymous_bytes(pid) >> 20} MiB"
        )
    for each in (short, long):
        rate = each.tokens / each.seconds
        lines.append(f"{each.complete} of {streams} complete, {rate:.0f} tokens/s")
    return "\n".join([*lines, *_steps(server)])


def _steps(server: Server) -> list[str]:
    told = scrape(server)
    steps, tokens = told.total("lockstep_steps_total"), told.total("lockstep_step_tokens_total")
    spent = {
        part: told.total("lockstep_host_time_seconds_sum", part=part) / steps
        for part in ("plan", "commit")
    }
    return [
        f"steps of {tokens / steps:.0f} tokens: "
        + ", ".join(f"{part} {1e6 * each:.0f} us" for part, each in spent.items())
        + " (by the clock)",
        pauses_text(told),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=100)
    parser.add_argument("--tokens", type=int, nargs=2, default=[16, 144])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_byte_model(Path(folder))
        step_s = args.step_ms / 1e3
        server = start_noop("ray", Path(folder) / "s", model, streams=args.streams, step_s=step_s)
        try:
            server.await_ready(180)
            sys.stdout.write(report(server, args.streams, args.tokens) + "\n")
        finally:
            server.clean_up()


if __name__ == "__main__":
    main()
