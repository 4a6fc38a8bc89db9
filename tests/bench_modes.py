"""Milliseconds of a step by graph mode and batch, on one rank: a benchmark, not a test.

    python tests/bench_modes.py --model tests/data/models/qwen3-0.6b --batch 1 8 32 128
    python tests/bench_modes.py --model DIR --modes NONE FULL --batch 4 --chunk 64 --compile

Every mode starts a worker of its own with random weights and gets the same plans: decode steps of
so many lanes, then mixed steps, in which one more lane computes a chunk of a prompt. Two steps are
on their way at a time, as in serving. The run mode that was agreed stands behind the time.
"""

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from lockstep.comm.messages import Chunk, JoinLane, ReplicaPlan, StepPlan, pack_ids
from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.resolve import resolve
from lockstep.parallel.agreement import agree, propose
from lockstep.parallel.rank_spec import RankSpec
from lockstep.parallel.topology import Topology
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.dispatch import create_dispatcher
from lockstep.worker.graphs.mode import GraphMode, RunMode
from lockstep.worker.loop import Worker
from lockstep.worker.results import PendingStep

PROMPT_LEN = 128
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16
BLOCKS_PER_LANE = MAX_MODEL_LEN // BLOCK_SIZE
PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class Row(NamedTuple):
    variant: str
    batch: int
    kind: str
    run_mode: str
    median_ms: float
    least_ms: float


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    rows: list[Row] = []
    for mode in args.modes:
        bench = ModeBench(_config(args, mode))
        rows += [row for batch in args.batch for row in bench.rows(args, mode, batch)]
        bench.close()
    _print_table(args, rows)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    modes = ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL"]
    parser.add_argument("--model", required=True)
    parser.add_argument("--modes", nargs="+", choices=list(GraphMode), default=modes)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--chunk", type=int, default=64, help="prompt tokens of a mixed step")
    parser.add_argument("--compile", action="store_true", help="torch.compile the segments")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    return parser.parse_args(argv)


def _config(args: argparse.Namespace, mode: str) -> tuple[WorkerConfig, str]:
    lanes = max(args.batch) + 1
    launch = LaunchConfig(
        model=args.model,
        load_format="dummy",
        device=args.device,
        cudagraph_mode=mode,
        compile=args.compile,
        max_cudagraph_capture_size=-(-(args.chunk + lanes) // 16) * 16,
        max_num_seqs=lanes,
        max_num_batched_tokens=max(512, lanes, args.chunk + lanes),
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=1 + lanes * BLOCKS_PER_LANE,
    )
    resolved = resolve(launch)
    for note in resolved.notes:
        _out(f"{mode}: {note}")
    return resolved.worker, "cuda:0" if resolved.device == "cuda" else "cpu"


class ModeBench:
    """A worker that is handed plans, each agreed on as the scheduler would."""

    def __init__(self, config_and_device: tuple[WorkerConfig, str]) -> None:
        config, device = config_and_device
        spec = RankSpec(global_rank=0, world_size=1, dp_rank=0, tp_rank=0, device=device)
        self._worker = Worker(config, spec, Topology.create(spec, config.parallel))
        self._worker.start()
        self._dispatch = create_dispatcher(config.graph, config.schedule).dispatch
        self._step_ids = count()

    def close(self) -> None:
        self._worker.close()

    def rows(self, args: argparse.Namespace, variant: str, batch: int) -> Iterator[Row]:
        self._start_lanes(batch)
        extra = _join(batch, PROMPT_LEN)
        chunk = Chunk(batch, pack_ids([7] * args.chunk), False)
        mixed = ReplicaPlan(batch + 1, leaves=[batch], joins=[extra], chunks=[chunk])
        for kind, replica in (("decode", ReplicaPlan(batch)), ("mixed", mixed)):
            run_mode = self._time(replica, args.steps)[1]
            times = [self._time(replica, args.steps)[0] for _ in range(args.repeats)]
            yield Row(variant, batch, kind, run_mode, statistics.median(times), min(times))
        self._run(ReplicaPlan(0, leaves=list(range(batch + 1))))

    def _start_lanes(self, batch: int) -> None:
        for lane in range(batch):
            chunk = Chunk(lane, pack_ids([lane + 5] * PROMPT_LEN), True)
            idle = list(range(lane))
            joins = [_join(lane, PROMPT_LEN)]
            self._run(ReplicaPlan(lane + 1, joins=joins, chunks=[chunk], idle_lanes=idle))

    def _time(self, replica: ReplicaPlan, steps: int) -> tuple[float, str]:
        """(milliseconds a step, run mode)."""
        pending: deque[PendingStep] = deque()
        began = time.perf_counter()
        for _ in range(steps):
            plan = self._plan(replica)
            pending += self._worker.launch(plan)
            if len(pending) > 1:
                pending.popleft().result()
        while pending:
            pending.popleft().result()
        milliseconds = (time.perf_counter() - began) * 1e3 / steps
        return milliseconds, RunMode(plan.agreement.run_mode).name

    def _run(self, replica: ReplicaPlan) -> None:
        self._worker.execute(self._plan(replica))

    def _plan(self, replica: ReplicaPlan) -> StepPlan:
        proposal = propose(replica, max_mode=RunMode.FULL)
        agreement = agree([proposal], self._dispatch)
        if agreement.run_mode < RunMode.EAGER:
            agreement = agree([proposal._replace(num_tokens=1, num_reqs=1)], self._dispatch)
        return StepPlan(0, next(self._step_ids), agreement, [replica])


def _join(lane: int, num_prompt_tokens: int) -> JoinLane:
    first = 1 + lane * BLOCKS_PER_LANE
    return JoinLane(
        lane=lane,
        req_id=f"r{lane}",
        seed=lane,
        sampling=PARAMS,
        stop_ids=b"",
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=0,
        num_output_tokens=0,
        block_ids=pack_ids(list(range(first, first + BLOCKS_PER_LANE))),
    )


def _print_table(args: argparse.Namespace, rows: list[Row]) -> None:
    _out(f"\n{Path(args.model).name}, context from {PROMPT_LEN}, chunk {args.chunk}, ms per step")
    _out("| mode | batch | step | ran as | median | least |\n|---|---|---|---|---|---|")
    for row in rows:
        times = f"{row.median_ms:.3f} | {row.least_ms:.3f}"
        _out(f"| {row.variant} | {row.batch} | {row.kind} | {row.run_mode} | {times} |")


def _out(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
