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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.comm.messages import Chunk, ReplicaPlan, pack_ids
from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.resolve import resolve
from lockstep.parallel.rank_spec import RankSpec
from lockstep.parallel.topology import Topology
from lockstep.worker.bare_steps import BareSteps
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.mode import GraphMode, RunMode
from lockstep.worker.loop import Worker

PROMPT_LEN = 128
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16


class Row(NamedTuple):
    variant: str
    batch: int
    kind: str
    run_mode: str
    median_ms: float
    least_ms: float

    def text(self) -> str:
        times = f"{self.median_ms:.3f} | {self.least_ms:.3f}"
        return f"| {self.variant} | {self.batch} | {self.kind} | {self.run_mode} | {times} |"


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    _out(f"{Path(args.model).name}, context from {PROMPT_LEN}, chunk {args.chunk}, ms per step\n")
    _out("| mode | batch | step | ran as | median | least |\n|---|---|---|---|---|---|")
    for mode in args.modes:
        bench = ModeBench(_config(args, mode))
        for batch in args.batch:
            for row in bench.rows(args, mode, batch):
                _out(row.text())
        bench.close()


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
        num_gpu_blocks_override=1 + lanes * MAX_MODEL_LEN // BLOCK_SIZE,
    )
    resolved = resolve(launch)
    for note in resolved.notes:
        sys.stderr.write(f"{mode}: {note}\n")
    return resolved.worker, "cuda:0" if resolved.device == "cuda" else "cpu"


class ModeBench:
    """A worker that is handed the same steps in one mode."""

    def __init__(self, config_and_device: tuple[WorkerConfig, str]) -> None:
        config, device = config_and_device
        spec = RankSpec(global_rank=0, world_size=1, dp_rank=0, tp_rank=0, device=device)
        self._worker = Worker(config, spec, Topology.create(spec, config.parallel))
        self._worker.start()
        self._steps = BareSteps(self._worker)

    def close(self) -> None:
        self._worker.close()

    def rows(self, args: argparse.Namespace, variant: str, batch: int) -> Iterator[Row]:
        steps = self._steps
        steps.start_lanes(batch, PROMPT_LEN)
        chunk = Chunk(batch, pack_ids([7] * args.chunk), False)
        joins = [steps.join(batch, PROMPT_LEN)]
        mixed = ReplicaPlan(batch + 1, leaves=[batch], joins=joins, chunks=[chunk])
        for kind, replica in (("decode", ReplicaPlan(batch)), ("mixed", mixed)):
            run_mode = RunMode(steps.run(replica).agreement.run_mode).name
            steps.time(replica, args.steps)
            timed = [steps.time(replica, args.steps) for _ in range(args.repeats)]
            times = [each.step_us / 1e3 for each in timed]
            yield Row(variant, batch, kind, run_mode, statistics.median(times), min(times))


def _out(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
