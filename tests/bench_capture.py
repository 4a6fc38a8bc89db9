"""First token after a start, and the steps that follow, by when graphs are captured.

    python tests/bench_capture.py --model tests/data/models/qwen3-0.6b --batch 8
    python tests/bench_capture.py --model DIR -tp 2 --tokens 2000

Each engine starts afresh with random weights. One request gives the first token; then ``--batch``
requests stream ``--tokens`` tokens each, while lazy capture goes on. A step is the mean time from
token to token of the first of them, since tokens arrive in groups; a stall is a longer wait than
``STALL_S`` for the next group.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lockstep.comm.messages import AddRequest, pack_ids
from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.engine import EngineClient
from lockstep.launcher.front_end import start_default_engine
from lockstep.launcher.resolve import resolve
from lockstep.launcher.start_report import late_report, start_report

PROMPT_LEN = 128
STALL_S = 0.02


class Run(NamedTuple):
    """Seconds of one engine."""

    capture: str
    start: float
    first_token: float
    waits: list[float]

    def row(self) -> str:
        stalls = [wait for wait in self.waits if wait > STALL_S]
        numbers = [self.start, self.first_token, statistics.mean(self.waits) * 1e3]
        cells = [f"{number:.2f}" for number in numbers]
        cells += [str(len(stalls)), f"{sum(stalls):.2f}", f"{max(self.waits) * 1e3:.1f}"]
        return f"| {self.capture} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    runs = [_run(args, capture) for capture in args.capture]
    _out(
        "\n| capture | can serve after s | first token after s | step ms | stalls "
        "| stalls s | longest wait ms |\n|---|---|---|---|---|---|---|"
    )
    for run in runs:
        _out(run.row())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("-tp", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--capture", nargs="+", default=["eager", "lazy"])
    return parser.parse_args(argv)


def _run(args: argparse.Namespace, capture: str) -> Run:
    config = LaunchConfig(
        model=args.model,
        load_format="dummy",
        tensor_parallel_size=args.tp,
        max_num_seqs=args.max_num_seqs,
        max_model_len=PROMPT_LEN + args.tokens,
        enable_prefix_caching=False,
        capture=capture,
    )
    resolved = resolve(config)
    began = time.perf_counter()
    engine = start_default_engine(resolved, lambda stage, done, total: None)
    try:
        started = time.perf_counter()
        engine.add(_request("first", 1))
        first_token = next(_arrivals(engine, 1, "first"))
        for index in range(args.batch):
            engine.add(_request(str(index), args.tokens))
        arrivals = list(_arrivals(engine, args.batch, "0"))
        _tell(capture, engine)
    finally:
        engine.shutdown()
    waits = [later - before for before, later in zip(arrivals, arrivals[1:], strict=False)]
    return Run(capture, started - began, first_token - began, waits)


def _request(req_id: str, num_tokens: int) -> AddRequest:
    draw = random.Random(req_id)
    prompt = [draw.randrange(1, 90) for _ in range(PROMPT_LEN)]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return AddRequest(req_id, pack_ids(prompt), sampling)


def _arrivals(engine: EngineClient, num_requests: int, watched: str) -> Iterator[float]:
    """When each token of a request came, until all requests have ended."""
    while num_requests:
        deltas = engine.poll(1.0)
        now = time.perf_counter()
        for delta in deltas:
            if delta.error is not None:
                raise RuntimeError(delta.error)
            if delta.req_id == watched and delta.token_ids:
                yield now
            num_requests -= delta.finish_reason is not None


def _tell(capture: str, engine: EngineClient) -> None:
    summary = engine.summary()
    stages = summary.ready[0].stage_seconds
    listed = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
    _out(f"{capture}: {listed}")
    for line in [*start_report(summary), *late_report(summary, engine.stats())]:
        _out(f"  {line}")


def _out(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
