"""Milliseconds of one decode step, through the whole product: a benchmark, not a test.

    python tests/bench_decode.py --model tests/data/models/qwen3-0.6b --batch 1 8 32 128
    python tests/bench_decode.py --model DIR -tp 2 --graphs --eager

Each run generates from the same random prompts twice, to a short and to a long length; the
difference over the steps between them is a step, prefill and start-up left out. Weights are
random (``--load-format dummy``) and requests ignore end tokens.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.llm import LLM

PROMPT_LEN = 128
SHORT, LONG = 16, 144


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    rows: list[tuple[str, int, float, float]] = []
    for name, settings in _variants(args):
        began = time.perf_counter()
        with LLM(args.model, load_format="dummy", tensor_parallel_size=args.tp, **settings) as llm:
            first = _first_token_s(llm, began)
            _print_start(name, llm, first)
            rows += [(name, batch, *_step_ms(llm, batch, args.repeats)) for batch in args.batch]
    _print_table(args, rows)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("-tp", type=int, default=1)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run-ahead", type=int, default=2)
    parser.add_argument("--all-reduce", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--eager", action="store_true", help="also without graphs")
    parser.add_argument("--plain", action="store_true", help="also the plain loop")
    return parser.parse_args(argv)


def _variants(args: argparse.Namespace) -> list[tuple[str, dict[str, object]]]:
    common = {
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": 2048,
        "run_ahead": args.run_ahead,
        "all_reduce": args.all_reduce,
        "enable_prefix_caching": False,
    }
    variants: list[tuple[str, dict[str, object]]] = [("graphs", common)]
    if args.plain:
        plain = common | {"run_ahead": None, "async_scheduling": False}
        variants.append(("graphs, plain loop", plain))
    if args.eager:
        variants.append(("eager", common | {"enforce_eager": True}))
    return variants


def _prompts(batch: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1000, 30000) for _ in range(PROMPT_LEN)] for _ in range(batch)]


def _generate_s(llm: LLM, batch: int, *, num_tokens: int, seed: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(_prompts(batch, seed), params)
    seconds = time.perf_counter() - began
    lengths = {len(output.token_ids) for output in outputs}
    if lengths != {num_tokens}:
        raise RuntimeError(f"expected {num_tokens} tokens of each request, got {lengths}")
    return seconds


def _step_ms(llm: LLM, batch: int, repeats: int) -> tuple[float, float]:
    """(median, least) over the repeats."""
    _generate_s(llm, batch, num_tokens=SHORT, seed=0)
    steps = []
    for seed in range(1, repeats + 1):
        short = _generate_s(llm, batch, num_tokens=SHORT, seed=seed)
        long = _generate_s(llm, batch, num_tokens=LONG, seed=seed)
        steps.append((long - short) * 1e3 / (LONG - SHORT))
    return statistics.median(steps), min(steps)


def _first_token_s(llm: LLM, began: float) -> float:
    _generate_s(llm, 1, num_tokens=1, seed=0)
    return time.perf_counter() - began


def _print_start(name: str, llm: LLM, first_token_s: float) -> None:
    summary = llm.summary()
    stages = summary.launch_seconds | summary.ready[0].stage_seconds
    listed = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items())
    _out(f"{name}: first token after {first_token_s:.2f} s ({listed}); {summary.num_graphs} graphs")


def _print_table(args: argparse.Namespace, rows: list[tuple[str, int, float, float]]) -> None:
    _out(f"\n{Path(args.model).name}, TP {args.tp}, prompt {PROMPT_LEN}, ms per decode step")
    _out("| variant | batch | median | least |\n|---|---|---|---|")
    for name, batch, median, least in rows:
        _out(f"| {name} | {batch} | {median:.3f} | {least:.3f} |")


def _out(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
