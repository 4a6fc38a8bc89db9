"""Host cost of plan + commit per decode step, without any rank. Not collected by pytest.

    python tests/bench_scheduler.py [--steps 400] [--requests 32 64 128 256 512 1024]

Prints microseconds of CPU time per step (means over the steps, so that block growth and prefix
cache are in), and what encoding the plan and decoding the result add.
"""

import argparse
import gc
import statistics
import sys
import time

from lockstep.comm.codec import decode_result, encode
from lockstep.comm.messages import AddRequest, StepPlan, StepResult, pack_ids
from lockstep.comm.sampling import SamplingParams
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.config import CacheConfig, GraphConfig, ModelConfig, ScheduleConfig
from lockstep.worker.schedule.scheduler import Scheduler

PROMPT = 32


def make_scheduler(num_requests: int, steps: int) -> Scheduler:
    """A scheduler with ``num_requests`` requests that run for ``steps`` steps and more."""
    length = PROMPT + 2 * steps + 80
    model = ModelConfig(
        architecture="none", vocab_size=32000, hidden_size=1, intermediate_size=1, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=1, max_position_embeddings=length,
    )  # fmt: skip
    scheduler = Scheduler(
        model,
        ScheduleConfig(max_num_seqs=num_requests, max_model_len=length),
        CacheConfig(),
        ParallelConfig(),
        GraphConfig(),
        num_requests * (length // 16 + 1) + 1,
    )
    for index in range(num_requests):
        sampling = SamplingParams(max_tokens=None, seed=1)
        prompt = pack_ids([index % 7, *range(1, PROMPT + index % 16)])
        scheduler.add(AddRequest(f"request-{index}", prompt, sampling, pack_ids([2])))
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    """Every lane that samples gives token 5."""
    (replica,) = plan.replicas
    silent = {chunk.lane for chunk in replica.chunks if not chunk.samples} | {*replica.idle_lanes}
    counts = pack_ids(int(lane not in silent) for lane in range(replica.num_lanes))
    return StepResult(0, plan.step_id, 0, 0, counts, pack_ids([5] * replica.num_lanes))


def measure(num_requests: int, steps: int) -> tuple[float, float, float]:
    """Mean us of plan, of commit, and of encoding a plan and a result and decoding the latter."""
    scheduler = make_scheduler(num_requests, steps)
    pending = [result_of(plan) for _ in range(2) if (plan := scheduler.plan(0)) is not None]
    times = list[tuple[float, float, float]]()
    while len(times) < steps:
        marks = [time.thread_time()]
        scheduler.commit(pending.pop(0))
        marks.append(time.thread_time())
        plan = scheduler.plan(0)
        marks.append(time.thread_time())
        assert plan is not None
        pending.append(result_of(plan))
        marks.append(time.thread_time())
        encode(plan)
        decode_result(encode(pending[-1]))
        marks.append(time.thread_time())
        if not plan.replicas[0].chunks and plan.replicas[0].num_lanes == num_requests:
            times.append((marks[2] - marks[1], marks[1] - marks[0], marks[4] - marks[3]))
    means = [1e6 * statistics.mean(each) for each in zip(*times, strict=True)]
    return means[0], means[1], means[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024])
    args = parser.parse_args()
    out = sys.stdout
    out.write("running    plan  commit  plan+commit us  ns per request  encode+decode us\n")
    for num_requests in args.requests:
        gc.collect()
        plan, commit, coding = measure(num_requests, args.steps)
        total = plan + commit
        times = f"{plan:7.1f} {commit:7.1f} {total:15.1f} {1e3 * total / num_requests:15.0f}"
        out.write(f"{num_requests:7d} {times} {coding:17.1f}\n")


if __name__ == "__main__":
    main()
