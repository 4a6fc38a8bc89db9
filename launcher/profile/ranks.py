"""The ranks that are profiled: rank 0 in this process, the others in children of it.

All take the same steps, planned alike, and record the same ones, so that none waits for a rank that
does something else. What rank 0 recorded is kept.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import torch

from lockstep.comm.rendezvous import serve_store
from lockstep.launcher.config import Device
from lockstep.launcher.engine import Progress
from lockstep.launcher.placement import LOOPBACK
from lockstep.launcher.processes import die_with_parent
from lockstep.parallel.rank_spec import RankSpec
from lockstep.parallel.topology import Topology
from lockstep.worker.bare_steps import BareSteps
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker
from lockstep.worker.profiling.decode import DecodeProfiler, Effort, StepRecord

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Of one batch: called, and in the best run mode that has a graph.
Recorded = tuple[StepRecord, StepRecord]

# A fresh interpreter: CUDA does not survive a fork.
_context = multiprocessing.get_context("spawn")
_END_S = 10.0


class RankTask(msgspec.Struct, frozen=True):
    """What every rank does: ``batches`` are numbers of requests, ``input_len`` long at first."""

    worker: WorkerConfig
    device: Device
    batches: tuple[int, ...]
    input_len: int
    effort: Effort


def run_ranks(task: RankTask, progress: Progress) -> list[Recorded]:
    """Start all ranks, profile, end them; called from the main thread, with which children die.

    Raises:
        ValueError: the configuration cannot be served.
        CommError: ranks disagree, or one is lost.
    """
    parallel = task.worker.parallel
    if parallel.world_size == 1:
        return _run_rank(task, _spec(task, 0, 0), None, progress)
    store, port = serve_store(LOOPBACK, parallel.world_size, parallel.timeout_s)
    with _others(task, port):
        return _run_rank(task, _spec(task, 0, port), store, progress)


@contextmanager
def _others(task: RankTask, port: int) -> Iterator[None]:
    """They end by themselves when rank 0 has all it wants, and by force if it fails."""
    specs = [_spec(task, rank, port) for rank in range(1, task.worker.parallel.world_size)]
    args = [(os.getpid(), msgspec.json.encode(task), msgspec.json.encode(spec)) for spec in specs]
    processes = [_context.Process(target=_follow, args=each) for each in args]
    for process in processes:
        process.start()
    try:
        yield
        for process in processes:
            process.join(_END_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _follow(parent: int, task: bytes, spec: bytes) -> None:
    die_with_parent(parent)
    # An interrupt is sent to everybody; the parent answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    decoded = msgspec.json.decode(task, type=RankTask)
    _run_rank(decoded, msgspec.json.decode(spec, type=RankSpec), None, _silent)


def _run_rank(
    task: RankTask, spec: RankSpec, store: "Store | None", progress: Progress
) -> list[Recorded]:
    config, device = task.worker, torch.device(spec.device)
    topology = Topology.create(spec, config.parallel, store=store, all_reduce=config.all_reduce)
    worker = Worker(config, spec, topology)
    try:
        worker.start(progress)
        profiler = DecodeProfiler(BareSteps(worker), device, task.effort)
        found = list[Recorded]()
        for done, num_reqs in enumerate(task.batches):
            progress("profile", done, len(task.batches))
            eager = profiler.profile(num_reqs, task.input_len, RunMode.EAGER)
            found.append((eager, profiler.profile(num_reqs, task.input_len, RunMode.FULL)))
        return found
    finally:
        # Graphs hold operations of the groups, so they go first.
        worker.close()
        topology.destroy()


def _spec(task: RankTask, rank: int, port: int) -> RankSpec:
    return RankSpec(
        global_rank=rank,
        world_size=task.worker.parallel.world_size,
        dp_rank=0,
        tp_rank=rank,
        local_rank=rank,
        device="cpu" if task.device == "cpu" else f"cuda:{rank}",
        master_addr=LOOPBACK,
        master_port=port,
    )


def _silent(stage: str, done: int, total: int) -> None:
    pass
