"""What a rank does in tests of serving over ranks: a worker, and a scheduler of its own.

All ranks hold the same scheduler and feed it the same results, so they hold the same plans.
"""

from collections import deque
from collections.abc import Iterator

import msgspec
from grammar_cases import patient_compiler
from inline import Served, make_scheduler
from ranks import Rank, join
from rig import chunk
from rig import join as join_lane

from lockstep.comm.codec import decode_result, encode
from lockstep.comm.messages import (
    AddRequest,
    GraphCost,
    ReplicaPlan,
    StepAgreement,
    StepPlan,
    StepResult,
)
from lockstep.parallel.topology import Topology
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker
from lockstep.worker.results import Pending
from lockstep.worker.schedule import late_captures
from lockstep.worker.schedule.scheduler import Scheduler


def serve_on_ranks(
    rank: Rank, config_bytes: bytes, adds: list[AddRequest], device: str = "cpu"
) -> tuple[dict[str, list[int]], list[StepPlan]]:
    """(tokens by request, plans) of one lockstep group that is the whole world."""
    config = msgspec.msgpack.decode(config_bytes, type=WorkerConfig)
    sizes = msgspec.structs.asdict(config.parallel)
    topology = join(rank, device=device, all_reduce=config.all_reduce, **sizes)
    outcome = serve_over(topology, config, adds)
    topology.destroy()
    return outcome


def serve_over(
    topology: Topology, config: WorkerConfig, adds: list[AddRequest]
) -> tuple[dict[str, list[int]], list[StepPlan]]:
    """``serve_on_ranks`` over groups that are there, and stay."""
    worker = Worker(config, topology.spec, topology)
    ready = worker.start()
    structured = any(add.sampling.structured_outputs for add in adds)
    compiler = patient_compiler(config.model.vocab_size) if structured else None
    scheduler = make_scheduler(config, ready.num_blocks, compiler)
    for add in adds:
        scheduler.add(add)
    outcome = run_together(worker, scheduler, topology)
    scheduler.check_conserved()
    worker.close()
    return outcome


def serve_and_capture(
    rank: Rank, config_bytes: bytes, adds: list[AddRequest], device: str = "cpu"
) -> tuple[dict[str, list[int]], list[int], list[GraphCost]]:
    """(tokens by request, places of the graphs ordered, what was captured for them) of a rank."""
    late_captures.STEPS_BETWEEN = 2
    captured, launch = list[GraphCost](), Worker.launch

    def noted(worker: Worker, plan: StepPlan) -> Iterator[Pending]:
        for pending in launch(worker, plan):
            cost = pending.result().captured if plan.capture is not None else None
            captured.extend([cost] if cost else [])
            yield pending

    Worker.launch = noted
    tokens, plans = serve_on_ranks(rank, config_bytes, adds, device)
    return tokens, [plan.capture for plan in plans if plan.capture is not None], captured


def run_together(
    worker: Worker, scheduler: Scheduler, topology: Topology
) -> tuple[dict[str, list[int]], list[StepPlan]]:
    served, pending, plans = Served(), deque(), []
    while True:
        plan = scheduler.plan(0)
        if plan is not None:
            plans.append(plan)
            pending.extend(worker.launch(plan))
        elif pending:
            own = encode(pending.popleft().result())
            results = [decode_result(data) for data in topology.world.all_gather_object(own)]
            assert_alike(results, topology.config.tp_size)
            for result in results:
                served.take(scheduler.commit(result))
        else:
            served.take(scheduler.take_deltas())
            return served.tokens, plans


def assert_alike(results: list[StepResult], tp_size: int) -> None:
    """All ranks of a replica sampled the same."""
    for first in range(0, len(results), tp_size):
        replica = results[first : first + tp_size]
        assert len({(result.counts, result.token_ids) for result in replica}) == 1, replica


def run_but_skip(rank: Rank, config_bytes: bytes, device: str = "cpu") -> None:
    """The last rank leaves out the second step, as no worker should."""
    config = msgspec.msgpack.decode(config_bytes, type=WorkerConfig)
    topology = join(rank, device=device, **msgspec.structs.asdict(config.parallel))
    worker = Worker(config, topology.spec, topology)
    worker.start()
    prompt = ReplicaPlan(1, joins=[join_lane(0, [1, 2], num_prompt=4)], chunks=[chunk(0, [7] * 4)])
    idle = [ReplicaPlan(0)] * (config.parallel.dp_size - 1)
    for step_id in range(4):
        busy = ReplicaPlan(1) if step_id else prompt
        counts = [1 if step_id else 4, *[1] * len(idle)]
        agreement = StepAgreement(RunMode.EAGER, None, counts, int(step_id > 0))
        if (rank.rank, step_id) != (rank.size - 1, 1):
            worker.execute(StepPlan(0, step_id, agreement, [busy, *idle]))
