"""A worker on a GPU, driven by hand: the same steps replayed or eager from the same state."""

import msgspec
import torch
from inline import request
from rig import chunk, join
from torch import Tensor

from lockstep.comm.messages import AddRequest, ReplicaPlan, StepAgreement, StepPlan, StepResult
from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.rank_spec import RankSpec
from lockstep.parallel.topology import Topology
from lockstep.worker.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ScheduleConfig,
    WorkerConfig,
)
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker

GPU_TINY = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=1003,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
    initializer_range=0.08,
    qk_norm=True,
    dtype="float32",
)
BLOCK_SIZE = 16
MAX_LANES = 24
MAX_MODEL_LEN = 512
BLOCKS_PER_LANE = 6
FULL_POOL = 1 + MAX_LANES * BLOCKS_PER_LANE

_NOT_LANES = {"output_ring", "output_counter", "step_number"}


def gpu_config(
    *,
    dtype: str = "float32",
    graph_mode: str = "FULL_AND_PIECEWISE",
    num_blocks: int | None = FULL_POOL,
    utilization: float = 0.9,
    parallel: ParallelConfig | None = None,
    run_ahead: int = 2,
    max_num_batched_tokens: int = 1024,
    capture_sizes: tuple[int, ...] | None = None,
    capture: str = "eager",
    compile: bool = False,
    all_reduce: str = "auto",
) -> WorkerConfig:
    return WorkerConfig(
        model=msgspec.structs.replace(GPU_TINY, dtype=dtype),
        parallel=parallel or ParallelConfig(),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            gpu_memory_utilization=utilization,
        ),
        schedule=ScheduleConfig(
            max_num_seqs=MAX_LANES,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            run_ahead=run_ahead,
        ),
        graph=GraphConfig(mode=graph_mode, capture_sizes=capture_sizes, capture=capture),
        model_path="",
        load_format="dummy",
        dtype=dtype,
        all_reduce=all_reduce,
        compile=compile,
    )


def prompt_of(lane: int) -> list[int]:
    """Lengths from 3 to 72, none a multiple of the block size."""
    return [(37 * lane + 11 * i + 5) % GPU_TINY.vocab_size for i in range(3 + 3 * lane)]


def gpu_requests(number: int, **sampling: object) -> list[AddRequest]:
    return [request(f"r{i}", prompt_of(i % MAX_LANES), **sampling) for i in range(number)]


class GpuRig:
    """Lane ``i`` has prompt ``i``; ``lens`` are the contexts of the lanes so far."""

    def __init__(self, config: WorkerConfig) -> None:
        spec = RankSpec(global_rank=0, world_size=1, dp_rank=0, tp_rank=0, device="cuda:0")
        self.worker = Worker(config, spec, Topology.create(spec, config.parallel))
        self.ready = self.worker.start()
        started = self.worker._started
        assert started is not None
        self.parts = started.bench.parts
        self.kv = started.memory.cache
        self.lens: list[int] = []
        self._step_id = 0

    @property
    def sizes(self) -> list[int]:
        return self.parts.graphs.sizes

    def close(self) -> None:
        self.worker.close()
        del self.parts, self.kv
        torch.cuda.empty_cache()

    def run(self, replica: ReplicaPlan, mode: RunMode, size: int | None) -> StepResult:
        uniform = 0 if replica.chunks else 1
        agreement = StepAgreement(mode, size, [size or 1], uniform)
        [result] = self.worker.execute(StepPlan(0, self._step_id, agreement, [replica]))
        self._step_id += 1
        return result

    def prefill(
        self,
        num_lanes: int,
        blocks: list[list[int]] | None = None,
        *,
        mode: RunMode = RunMode.EAGER,
        size: int | None = None,
    ) -> StepResult:
        """All prompts in one mixed step; ``size`` is that of the graph that ``mode`` replays."""
        blocks = blocks or [self.blocks_of(lane) for lane in range(num_lanes)]
        joins = [
            join(lane, blocks[lane], num_prompt=len(prompt_of(lane))) for lane in range(num_lanes)
        ]
        chunks = [chunk(lane, prompt_of(lane)) for lane in range(num_lanes)]
        self.lens = [len(prompt_of(lane)) for lane in range(num_lanes)]
        return self.run(ReplicaPlan(num_lanes, joins=joins, chunks=chunks), mode, size)

    def decode(self, mode: RunMode, size: int) -> tuple[bytes, Tensor]:
        """(token ids, logits) of the real lanes after one step of ``size`` lanes."""
        num_lanes = len(self.lens)
        result = self.run(ReplicaPlan(num_lanes), mode, size)
        assert result.counts.count(1) == num_lanes
        self.lens = [length + 1 for length in self.lens]
        return result.token_ids, self.parts.state.logits[:num_lanes].clone()

    def keep(self, num_lanes: int) -> None:
        """Let the lanes from ``num_lanes`` on leave, in an eager step."""
        leaves = list(range(num_lanes, len(self.lens)))
        self.lens = [length + 1 for length in self.lens[:num_lanes]]
        self.run(ReplicaPlan(num_lanes, leaves=leaves), RunMode.EAGER, None)

    def blocks_of(self, lane: int) -> list[int]:
        """From the top of the pool downwards, so that a full pool's last blocks are used."""
        top = FULL_POOL - 1 - lane * BLOCKS_PER_LANE
        return list(range(top, top - BLOCKS_PER_LANE, -1))

    def live_slots(self) -> Tensor:
        """[num_blocks, block_size] bool: slots that hold a token of a live context."""
        live = torch.zeros(self.kv.num_blocks, BLOCK_SIZE, dtype=torch.bool, device="cuda")
        for lane, length in enumerate(self.lens):
            for position in range(length):
                block = self.blocks_of(lane)[position // BLOCK_SIZE]
                live[block, position % BLOCK_SIZE] = True
        return live

    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        statics = self.parts.state.statics() | self.parts.sampling.statics()
        kept = [tensor for name, tensor in statics.items() if name not in _NOT_LANES]
        kept.append(self.kv.storage[: self.kv.num_blocks])
        return [(tensor, tensor.clone()) for tensor in kept] + [
            (torch.tensor(self.lens), torch.tensor(self.lens))
        ]

    def restore(self, snapshot: list[tuple[Tensor, Tensor]]) -> None:
        for tensor, value in snapshot[:-1]:
            tensor.copy_(value)
        self.lens = snapshot[-1][1].tolist()
