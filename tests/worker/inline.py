"""Scheduler and one worker in one process, turn by turn: the plainest way to serve."""

from collections import deque
from collections.abc import Callable

import msgspec
import torch
from rig import BLOCK_SIZE, MAX_LANES, MAX_MODEL_LEN, TINY

from lockstep.comm.messages import AddRequest, TokenDelta, pack_ids, unpack_ids
from lockstep.comm.sampling import SamplingParams
from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.rank_spec import RankSpec
from lockstep.parallel.topology import Topology
from lockstep.worker.assembly import build_attention, build_model
from lockstep.worker.config import CacheConfig, GraphConfig, ScheduleConfig, WorkerConfig
from lockstep.worker.grammars.compiler import GrammarCompiler
from lockstep.worker.loop import Worker
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.results import PendingStep
from lockstep.worker.schedule.scheduler import Scheduler
from lockstep.worker.weights.load import load_weights

SPEC = RankSpec(global_rank=0, world_size=1, dp_rank=0, tp_rank=0)
# Logits of a tiny model only differ clearly if its weights are large.
LOUD_TINY = msgspec.structs.replace(TINY, initializer_range=0.3)


def worker_config(
    *,
    run_ahead: int = 2,
    num_blocks: int = 60,
    max_num_batched_tokens: int = 64,
    graph_mode: str = "NONE",
    capture: str = "eager",
    caching: bool = True,
    max_num_seqs: int = MAX_LANES,
    parallel: ParallelConfig | None = None,
) -> WorkerConfig:
    return WorkerConfig(
        model=LOUD_TINY,
        parallel=parallel or ParallelConfig(timeout_s=20),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            enable_prefix_caching=caching,
        ),
        schedule=ScheduleConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            run_ahead=run_ahead,
        ),
        graph=GraphConfig(mode=graph_mode, capture=capture),
        model_path="",
        load_format="dummy",
        dtype="float32",
    )


def alone_topology() -> Topology:
    return Topology.single("cpu")


def dummy_model(config: WorkerConfig) -> DecoderModel:
    """The model that a worker of ``config`` serves, for an oracle."""
    device = torch.device("cpu")
    model = build_model(config, alone_topology(), build_attention(config, device), device)
    load_weights(model, config)
    return model


def make_scheduler(
    config: WorkerConfig, num_blocks: int, compiler: GrammarCompiler | None = None
) -> Scheduler:
    return Scheduler(
        config.model, config.schedule, config.cache, config.parallel, config.graph, num_blocks,
        compiler=compiler,
    )  # fmt: skip


def request(
    req_id: str, prompt: list[int], stop_ids: list[int] | None = None, **sampling: object
) -> AddRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | sampling)
    return AddRequest(req_id, pack_ids(prompt), params, pack_ids(stop_ids or []))


class Served:
    """Tokens and finish reason by request, as they came."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.logprobs: dict[str, list[object]] = {}
        self.errors: dict[str, str] = {}

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.tokens.setdefault(delta.req_id, []).extend(unpack_ids(delta.token_ids))
            self.logprobs.setdefault(delta.req_id, []).extend(delta.logprobs or [])
            if delta.finish_reason:
                self.finish[delta.req_id] = delta.finish_reason
            if delta.error:
                self.errors[delta.req_id] = delta.error


def serve(
    config: WorkerConfig, requests: list[AddRequest], compiler: GrammarCompiler | None = None
) -> tuple[Served, Scheduler, Worker]:
    """Run all requests to their end, with results held back as long as the scheduler allows."""
    worker = Worker(config, SPEC, alone_topology())
    ready = worker.start()
    scheduler = make_scheduler(config, ready.num_blocks, compiler)
    for each in requests:
        scheduler.add(each)
    served = Served()
    run_turns(worker, scheduler, served)
    scheduler.check_conserved()
    worker.close()
    return served, scheduler, worker


def run_turns(
    worker: Worker,
    scheduler: Scheduler,
    served: Served,
    *,
    after_launch: Callable[[], None] = lambda: None,
) -> None:
    """Plan, launch and commit until there is nothing left to do.

    Results are held back as long as the scheduler goes on planning without them.
    """
    pending: deque[PendingStep] = deque()
    while True:
        plan = scheduler.plan(0)
        if plan is not None:
            pending.extend(worker.launch(plan))
            after_launch()
        elif pending:
            served.take(scheduler.commit(pending.popleft().result()))
        else:
            break
    served.take(scheduler.take_deltas())
