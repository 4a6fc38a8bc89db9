"""Grammars on GPUs: masks between graphs, texts against oracles, all ranks against one."""

import importlib.util

import msgspec
import pytest
import torch
from compilations import compilations
from gpu_rig import GPU_TINY, GpuRig, gpu_config, gpu_requests
from grammar_cases import check_texts, constrained, patient_compiler
from inline import Served, make_scheduler, run_turns
from lockstep_ranks import serve_on_ranks
from ranks import num_gpus, run_ranks

from lockstep.comm.messages import AddRequest
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.graphs.mode import RunMode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs llguidance"),
]
SEEDS = range(4)
OPTIONS = {"max_num_batched_tokens": 128, "capture_sizes": (1, 2, 4, 8, 16, 24, 48, 128)}


def mixed() -> list[AddRequest]:
    free = gpu_requests(8, max_tokens=24, temperature=0.8, seed=3)
    return [*free[:4], *constrained(SEEDS), *free[4:]]


def served_in(mode: str) -> dict[str, list[int]]:
    """Nothing is compiled or allocated meanwhile, and decode steps replay graphs."""
    rig = GpuRig(gpu_config(graph_mode=mode, **OPTIONS))
    compiler, served = patient_compiler(GPU_TINY.vocab_size), Served()
    scheduler = make_scheduler(rig.worker.config, rig.ready.num_blocks, compiler)
    for add in mixed():
        scheduler.add(add)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    with compilations() as compiled:
        run_turns(rig.worker, scheduler, served)
    replayed = rig.worker.metrics.num_steps[RunMode.FULL]
    allocated = torch.cuda.memory_stats()["num_device_alloc"] - before
    rig.close()
    assert (replayed > 0) == (mode != "NONE")
    if mode != "NONE":
        assert (compiled, allocated) == ([], 0)
    return served.tokens


def test_masks_between_graphs_are_those_of_eager_steps() -> None:
    eager, replayed = served_in("NONE"), served_in("FULL_AND_PIECEWISE")
    assert len(check_texts(eager, SEEDS)) > len(SEEDS)
    assert replayed == eager


@pytest.mark.multigpu
def test_each_rank_masks_its_own_shard() -> None:
    tokens = []
    for tp_size in (1, num_gpus()):
        config = gpu_config(parallel=ParallelConfig(tp_size=tp_size), **OPTIONS)
        data = msgspec.msgpack.encode(config)
        outcomes = run_ranks(
            serve_on_ranks, tp_size, data, mixed(), "cuda", gloo=False, timeout_s=240
        )
        tokens += [served for served, _ in outcomes]
    assert tokens[1:] == [tokens[0]] * num_gpus()
    check_texts(tokens[0], SEEDS)
