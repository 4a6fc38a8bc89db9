"""Several GPUs against one: the same tokens in float32, with graphs and in lockstep."""

import msgspec
import numpy as np
import pytest
import torch
from gpu_rig import gpu_config, gpu_requests, prompt_of
from lockstep_ranks import serve_on_ranks
from ranks import Rank, num_gpus, run_ranks
from ranks import join as join_ranks
from rig import chunk, join

from lockstep.comm.messages import ReplicaPlan, StepAgreement, StepPlan
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(300)]

PROMPTS = (1, 7, 12)
SIZES = (1, 2, 4, 8, 16, 24, 48, 128)  # all batches of at most 128 tokens have a graph
BLOCKS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def serve(parallel: ParallelConfig, number: int, **options: object) -> list[dict[str, list[int]]]:
    config = msgspec.msgpack.encode(gpu_config(parallel=parallel, **options))
    adds = gpu_requests(number, max_tokens=24)
    outcomes = run_ranks(
        serve_on_ranks, parallel.world_size, config, adds, "cuda", gloo=False, timeout_s=240
    )
    return [tokens for tokens, _ in outcomes]


def logits_on_rank(rank: Rank, config_bytes: bytes) -> tuple[np.ndarray, np.ndarray]:
    """This rank's logits of three prompts, and after one replayed decode step."""
    config = msgspec.msgpack.decode(config_bytes, type=WorkerConfig)
    topology = join_ranks(rank, device="cuda", **msgspec.structs.asdict(config.parallel))
    worker = Worker(config, topology.spec, topology)
    worker.start()
    state = worker._started.bench.parts.state
    prompts = [prompt_of(i) for i in PROMPTS]
    joins = [join(i, BLOCKS[i], num_prompt=len(prompt)) for i, prompt in enumerate(prompts)]
    chunks = [chunk(i, prompt) for i, prompt in enumerate(prompts)]
    mixed = StepAgreement(RunMode.EAGER, None, [sum(map(len, prompts))], 0)
    worker.execute(StepPlan(0, 0, mixed, [ReplicaPlan(3, joins=joins, chunks=chunks)]))
    prefilled = state.logits[:3].cpu().numpy()
    full = StepAgreement(RunMode.FULL, 4, [3], 1)
    worker.execute(StepPlan(0, 1, full, [ReplicaPlan(3)]))
    decoded = state.logits[:3].cpu().numpy()
    worker.close()
    topology.destroy()
    return prefilled, decoded


def all_logits(tp_size: int) -> list[np.ndarray]:
    """[3, vocab_size], prefilled and decoded, put together from the ranks' shards."""
    parallel = ParallelConfig(tp_size=tp_size)
    config = gpu_config(parallel=parallel)
    shards = run_ranks(
        logits_on_rank, tp_size, msgspec.msgpack.encode(config), gloo=False, timeout_s=240
    )
    vocab_size = config.model.vocab_size
    return [np.concatenate(parts, 1)[:, :vocab_size] for parts in zip(*shards, strict=True)]


def test_all_tensor_parallel_ranks_have_the_logits_of_one() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    for one, all_of_them in zip(all_logits(1), all_logits(num_gpus()), strict=True):
        np.testing.assert_allclose(all_of_them, one, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return serve(ParallelConfig(), 30)[0]


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_all_tensor_parallel_ranks_give_the_tokens_of_one(mode: str, expected) -> None:
    options = {"graph_mode": mode, "max_num_batched_tokens": 128, "capture_sizes": SIZES}
    parallel = ParallelConfig(tp_size=num_gpus())
    assert serve(parallel, 30, **options) == [expected] * num_gpus()


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("number", [1, 30], ids=["one busy", "all busy"])
def test_replicas_in_lockstep_with_graphs(number: int, mode: str) -> None:
    [expected] = serve(ParallelConfig(), number)
    parallel = ParallelConfig(dp_size=num_gpus(), dp_lockstep="always", verify_agreement=True)
    options = {"graph_mode": mode, "max_num_batched_tokens": 128, "capture_sizes": SIZES}
    assert serve(parallel, number, **options) == [expected] * num_gpus()
