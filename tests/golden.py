"""The golden matrix: every way to run SmolLM2 in float32 gives the same tokens.

As a program it runs all of the matrix and writes a report; tests/launcher/test_golden.py runs a
pairwise cover of it. Expected tokens come from another implementation (data/golden_smollm2.json).
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pairwise import Case, all_cases, pairwise

GOLDEN = Path(__file__).parent / "data" / "golden_smollm2.json"
AXES = {
    "shape": ("1x1", "2x1", "3x1", "1x2", "2x2"),
    "launcher": ("ray", "torchrun"),
    "loop": ("overlapped", "plain"),
    "graphs": ("host", "eager"),
    "prefix cache": ("on", "off"),
    "pool": ("ample", "tiny"),
    "requests": ("mixed", "alone"),
}
# Eight blocks for requests of up to seven: two long answers cannot both be held to their end.
POOLS = {"ample": 129, "tiny": 9}
TIMEOUT_S = 600
MAX_TOKENS = 64
EXPECTED = "as expected"


@dataclass(frozen=True)
class Verdict:
    """What a case gave; ``difference`` is empty if all tokens are as expected."""

    difference: str
    num_requests: int
    preemptions: int
    seconds: float


def golden_items() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["items"]
    return items


def degrees(case: Case) -> tuple[int, int]:
    """(TP, DP) of a case."""
    tp, dp = case["shape"].split("x")
    return int(tp), int(dp)


def settings(case: Case, max_tokens: int) -> list[str]:
    """The case as flags."""
    tp, dp = degrees(case)
    flags = [
        *("--model", "smollm2", "--device", "cpu", "--temperature", "0"),
        *("--max-tokens", str(max_tokens)),
        *("-tp", str(tp), "-dp", str(dp)),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "48", "--max-model-len", "128"),
        *("--num-gpu-blocks-override", str(POOLS[case["pool"]])),
        "--async-scheduling" if case["loop"] == "overlapped" else "--no-async-scheduling",
        "--enable-prefix-caching" if case["prefix cache"] == "on" else "--no-enable-prefix-caching",
    ]
    flags += ["--enforce-eager"] if case["graphs"] == "eager" else []
    flags += ["--max-concurrency", "1"] if case["requests"] == "alone" else []
    return flags


def requests(case: Case) -> list[dict[str, Any]]:
    """Each prompt once; mixed, the longest so often that some replica must hold two of it."""
    first, second, longest = golden_items()
    if case["requests"] == "alone":
        return [first, second, longest]
    _, dp = degrees(case)
    return [*[longest] * (dp + 1), first, second]


def command(case: Case) -> list[str]:
    """The program that runs a case, without its arguments."""
    if case["launcher"] == "ray":
        return [sys.executable, "-P", "-m", "lockstep"]
    tp, dp = degrees(case)
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={tp * dp}", "-m", "lockstep.launcher.torchrun"]


def run(case: Case, max_tokens: int = MAX_TOKENS) -> Verdict:
    """Start an engine for the case, answer its requests, compare their first ``max_tokens``."""
    asked = requests(case)
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        source, target = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        source.write_text("".join(json.dumps({"prompt": item["prompt"]}) + "\n" for item in asked))
        files = ["--prompts-file", str(source), "--output", str(target)]
        try:
            done = subprocess.run(
                [*command(case), "generate", *settings(case, max_tokens), *files],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Verdict(f"no answer in {TIMEOUT_S} s", len(asked), 0, TIMEOUT_S)
        text = target.read_text() if target.exists() else ""
    seconds = time.monotonic() - began
    if done.returncode != 0:
        return Verdict(f"exit {done.returncode}: {done.stderr[-2000:]}", len(asked), 0, seconds)
    records = [json.loads(line) for line in text.splitlines()]
    return Verdict(
        difference(asked, records, max_tokens), len(asked), preemptions(done.stderr), seconds
    )


def difference(asked: list[dict[str, Any]], records: list[dict[str, Any]], max_tokens: int) -> str:
    """The first token that is not as expected, or nothing."""
    if len(asked) != len(records):
        return f"{len(records)} answers to {len(asked)} requests"
    for item, record in zip(asked, records, strict=True):
        where = f"request {record['index']} ({item['prompt']!r})"
        if "error" in record:
            return f"{where}: {record['error']}"
        if record["num_prompt_tokens"] != len(item["prompt_ids"]):
            return f"{where}: {record['num_prompt_tokens']} prompt tokens"
        expected = item["output_ids"][:max_tokens]
        pairs = enumerate(zip(expected, record["token_ids"], strict=False))
        wrong = next((f"{n}: {got}, not {want}" for n, (want, got) in pairs if want != got), None)
        if wrong:
            return f"{where}: token {wrong}"
        whole = len(expected) == len(item["output_ids"])
        text = item["text"] if whole else item["text"][: len(record["text"])]
        if (record["token_ids"], record["text"]) != (expected, text):
            return f"{where}: {len(record['token_ids'])} tokens, text {record['text']!r}"
    return ""


def preemptions(stderr: str) -> int:
    words = stderr.replace(",", " ").split()
    return int(words[words.index("preemptions") - 1]) if "preemptions" in words else 0


def row(case: Case, verdict: Verdict) -> str:
    """A line of the report's table."""
    outcome = verdict.difference.replace("\n", " ").replace("|", "/") or EXPECTED
    counts = (verdict.num_requests, verdict.preemptions, f"{verdict.seconds:.0f}")
    return f"{_key(case)} {' | '.join(map(str, [*counts, outcome]))} |\n"


def _key(case: Case) -> str:
    return f"| {' | '.join(case.values())} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="keep what the report has of a run")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    options = parser.parse_args()
    path: Path = options.report
    kept = path.read_text().splitlines(keepends=True) if options.resume and path.exists() else []
    cases = all_cases(AXES)
    rows = {_key(case): line for case in cases for line in kept if line.startswith(_key(case))}
    # The cover first, so that a run that is cut short has seen all sides.
    waiting = {_key(case): case for case in [*pairwise(AXES), *cases] if _key(case) not in rows}
    for case, verdict in verdicts(list(waiting.values()), options.jobs):
        rows[_key(case)] = row(case, verdict)
        sys.stderr.write(f"{len(rows)} of {len(cases)} {rows[_key(case)]}")
        ordered = [rows[key] for key in map(_key, cases) if key in rows]
        path.write_text(document(ordered, len(cases)))
    return 1 if num_different(list(rows.values())) else 0


def verdicts(cases: list[Case], jobs: int) -> Iterator[tuple[Case, Verdict]]:
    """Run cases, ``jobs`` at a time, and give each as it ends."""
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, case): case for case in cases}
        for done in as_completed(running):
            yield running[done], done.result()


def num_different(rows: list[str]) -> int:
    return sum(not line.endswith(f"| {EXPECTED} |\n") for line in rows)


def document(rows: list[str], num_cases: int) -> str:
    columns = [*AXES, "requests run", "preemptions", "seconds", "tokens"]
    head = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    counts = {"run": len(rows), "cases": num_cases, "different": num_different(rows)}
    return _HEADING.format(**counts) + head + "".join(rows)


_HEADING = """# The golden matrix

Made by `make golden` on a CPU: {run} of {cases} cases, {different} of them with other tokens than
those that transformers gave for the same prompts (tests/data/golden_smollm2.json). Shapes are TP x
DP; a tiny pool holds eight blocks of KV, so that requests are preempted; mixed requests share
batches, others run alone.

"""


if __name__ == "__main__":
    raise SystemExit(main())
