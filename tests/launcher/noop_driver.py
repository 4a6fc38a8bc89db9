"""``lockstep`` over ranks without a model: python noop_driver.py ray|thread serve MODEL ...

``ray``: scheduler and rank are actors, as in the product. ``thread``: both are threads of the
server's process, which starts faster and shares its time. NOOP_STEP_S is how long a rank waits
before it answers (0).
"""

import os
import sys
import threading
import time

import launch_fakes
from msgspec import structs

from lockstep.comm.channel import open_reader, open_writer
from lockstep.comm.codec import encode
from lockstep.comm.messages import StepPlan, StepResult, pack_ids
from lockstep.launcher.channels import Seating
from lockstep.launcher.cli import guarded
from lockstep.launcher.cluster import start_ray_engine
from lockstep.launcher.engine import EngineSummary
from lockstep.launcher.host_engine import HostEngine
from lockstep.launcher.scheduler_host import SchedulerHost
from lockstep.parallel.rank_spec import RankSpec

TOKEN = 5


class NoopWorker(launch_fakes.FakeWorker):
    """Every lane that samples gets the same token."""

    def start(self, progress=None):
        schedule, block_size = self.config.schedule, self.config.cache.block_size
        blocks = schedule.max_num_seqs * -(-schedule.max_model_len // block_size) + 1
        return structs.replace(super().start(progress), num_blocks=blocks)

    def step(self, plan, results):
        time.sleep(float(os.environ.get("NOOP_STEP_S", "0")))
        if self.spec.tp_rank == 0:
            results.write(encode(answer(plan, self.spec.dp_rank)), 5.0)
        self.last_step = plan.step_id


def answer(plan: StepPlan, dp_rank: int) -> StepResult:
    (replica,) = plan.replicas
    silent = {chunk.lane for chunk in replica.chunks if not chunk.samples} | {*replica.idle_lanes}
    counts = pack_ids(int(lane not in silent) for lane in range(replica.num_lanes))
    tokens = pack_ids([TOKEN] * replica.num_lanes)
    return StepResult(plan.epoch, plan.step_id, dp_rank, 0, counts, tokens)


def start_with_ray(resolved, progress):
    return start_ray_engine(resolved, progress, worker_type=NoopWorker)


def start_in_threads(resolved, progress):
    spec = RankSpec(global_rank=0, world_size=1, dp_rank=0, tp_rank=0, device="cpu")
    worker = NoopWorker(resolved.worker, spec, None)
    ready = worker.start()
    host = SchedulerHost(resolved.worker, [ready], seating=Seating())
    (channels,) = host.addresses()
    ends = open_reader(channels.plans, channels.reader_index), open_writer(channels.results)
    threading.Thread(target=worker.run, args=ends, daemon=True).start()
    return HostEngine(host, EngineSummary(launcher="thread", ready=[ready]))


if __name__ == "__main__":
    kind, *argv = sys.argv[1:]
    sys.exit(guarded(argv, {"ray": start_with_ray, "thread": start_in_threads}[kind]))
