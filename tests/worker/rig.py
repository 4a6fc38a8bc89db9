"""A tiny model with a ModelRunner around it, plans written by hand, and the slow way to decode."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.comm.collectives import Communicator
from lockstep.comm.messages import (
    Chunk,
    JoinLane,
    LaneBlocks,
    ReplicaPlan,
    StepAgreement,
    StepPlan,
    StepResult,
    pack_ids,
    unpack_ids,
)
from lockstep.comm.sampling import SamplingParams
from lockstep.parallel.rank_spec import RankSpec
from lockstep.parallel.topology import Topology
from lockstep.worker.attention.base import AttentionSizes, create_backend
from lockstep.worker.bodies import RunnerParts
from lockstep.worker.config import ModelConfig
from lockstep.worker.forward import AttentionMetadata, ForwardInputs
from lockstep.worker.graphs.backend import GraphBackend
from lockstep.worker.graphs.dispatch import BatchDescriptor
from lockstep.worker.graphs.host import HostBackend
from lockstep.worker.graphs.manifest import Manifest, ManifestEntry
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.graphs.runner import GraphRunner
from lockstep.worker.kv_cache import KVCache, KVLayout
from lockstep.worker.lanes import LaneTable
from lockstep.worker.masks import LaneMasks
from lockstep.worker.model_runner import ModelRunner
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.sampler import Sampler
from lockstep.worker.sampling_state import LaneSampling
from lockstep.worker.state import StepState
from lockstep.worker.step import Step
from lockstep.worker.step_graphs import StepGraphs
from lockstep.worker.step_inputs import StepInputs
from lockstep.worker.upload import Uploader

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    dtype="float32",
)
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
MAX_LANES = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def tiny_model(config: ModelConfig = TINY, device: str = "cpu", seed: int = 0) -> DecoderModel:
    """Weights large enough that greedy tokens differ from prompt to prompt."""
    sizes = AttentionSizes(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        max_num_reqs=MAX_LANES,
        max_num_tokens=256,
        max_model_len=MAX_MODEL_LEN,
        dtype=torch.float32,
        device=torch.device(device),
    )
    backend = create_backend("auto", sizes)
    model = DecoderModel(
        config, Communicator.single(), backend, torch.device(device), torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        weight.data.copy_(1 + 0.1 * noise if "norm" in name else 0.3 * noise)
    return model


@dataclass
class Rig:
    """One rank."""

    model: DecoderModel
    parts: RunnerParts
    runner: ModelRunner

    @property
    def kv(self) -> KVCache:
        return self.parts.step.kv

    @property
    def state(self) -> StepState:
        return self.parts.state

    @property
    def sampling(self) -> LaneSampling:
        return self.parts.sampling

    def capture(self, *sizes: int, split: Sequence[int] = (), mixed: Sequence[int] = ()) -> None:
        """Capture graphs and forget what that left in the lanes.

        Args:
            sizes: of decode graphs, ``split`` of those in segments, ``mixed`` of any batch.
        """
        entries = [ManifestEntry(RunMode.PIECEWISE, BatchDescriptor(n, None, 0)) for n in split]
        entries += [
            ManifestEntry(RunMode.FULL, BatchDescriptor(n, min(n, MAX_LANES), 0)) for n in mixed
        ]
        entries += [ManifestEntry(RunMode.FULL, BatchDescriptor(n, n, 1)) for n in sizes]
        self.parts.graphs.capture(Manifest(tuple(entries)))
        self.runner.clear()

    def run(self, plan: StepPlan) -> StepResult:
        [result] = [pending.result() for pending in self.runner.launch(plan)]
        return result


def make_rig(
    model: DecoderModel | None = None,
    *,
    num_blocks: int = 40,
    run_ahead: int = 2,
    dp: Communicator | None = None,
    backend: GraphBackend | None = None,
    num_timestamps: int = 0,
) -> Rig:
    model, dp = model or tiny_model(), dp or Communicator.single()
    config, device = model.config, model.model.norm.weight.device
    layout = KVLayout(
        config.num_layers, BLOCK_SIZE, model.num_kv_heads_local, config.head_dim, torch.float32
    )
    kv = KVCache.allocate(layout, num_blocks, device)
    width = MAX_MODEL_LEN // BLOCK_SIZE
    depth = run_ahead + 2
    state = StepState(
        max_lanes=MAX_LANES,
        max_tokens=256,
        max_blocks_per_req=width,
        vocab_local=model.vocab_local,
        ring_depth=depth,
        num_replicas=dp.size,
        device=device,
        num_timestamps=num_timestamps,
    )
    sampling = LaneSampling(
        MAX_LANES,
        vocab_start=0,
        vocab_local=model.vocab_local,
        vocab_size=config.vocab_size,
        device=device,
    )
    inputs = StepInputs(state, BLOCK_SIZE, MAX_MODEL_LEN)
    step = Step(model, kv, state, Sampler(sampling, Communicator.single()), dp)
    graph_runner = GraphRunner(backend or HostBackend(), Topology.single())
    graphs = StepGraphs(graph_runner, step, inputs, sampling)
    parts = RunnerParts(
        spec=RankSpec(global_rank=0, world_size=1, dp_rank=0, tp_rank=0),
        state=state,
        sampling=sampling,
        lanes=LaneTable(MAX_LANES, width),
        upload=Uploader(4096, depth, device),
        masks=LaneMasks(MAX_LANES, vocab_start=0, vocab_size=config.vocab_size, device=device),
        inputs=inputs,
        step=step,
        graphs=graphs,
    )
    return Rig(model, parts, ModelRunner(parts, 0))


def decode_alone(model: DecoderModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens, each from a prefill of everything before it in a cache of its own."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(prefill_logits(model, token_ids).argmax()))
    return token_ids[len(prompt) :]


def prefill_logits(model: DecoderModel, token_ids: list[int]) -> torch.Tensor:
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    device = model.model.norm.weight.device
    layout = KVLayout(
        model.config.num_layers, BLOCK_SIZE, model.num_kv_heads_local, model.config.head_dim,
        torch.float32,
    )  # fmt: skip
    kv = KVCache.allocate(layout, num_blocks + 1, device)
    metadata = AttentionMetadata(
        slots=torch.arange(num_tokens, device=device) + BLOCK_SIZE,
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)[None],
        max_query_len=num_tokens,
        max_context_len=num_blocks * BLOCK_SIZE,
    )
    positions = torch.arange(num_tokens, device=device)
    inputs = ForwardInputs(torch.tensor(token_ids, device=device), positions, metadata, None)
    return model.logits(model(inputs, kv)[-1:])[0]


def join(
    lane: int,
    blocks: list[int],
    *,
    num_prompt: int = 1,
    num_computed: int = 0,
    num_output: int = 0,
    stop_ids: list[int] | None = None,
    sampling: SamplingParams = GREEDY,
) -> JoinLane:
    return JoinLane(
        lane=lane,
        req_id=f"r{lane}",
        seed=1,
        sampling=sampling,
        stop_ids=pack_ids(stop_ids or []),
        num_prompt_tokens=num_prompt,
        num_computed_tokens=num_computed,
        num_output_tokens=num_output,
        block_ids=pack_ids(blocks),
    )


def chunk(lane: int, token_ids: list[int], *, samples: bool = True) -> Chunk:
    return Chunk(lane, pack_ids(token_ids), samples)


def grant(lane: int, blocks: list[int]) -> LaneBlocks:
    return LaneBlocks(lane, pack_ids(blocks))


def eager(step_id: int, replica: ReplicaPlan, *, num_steps: int = 1) -> StepPlan:
    lens = [len(c.token_ids) // 4 for c in replica.chunks]
    num_tokens = replica.num_lanes - len(replica.idle_lanes) - len(lens) + sum(lens)
    uniform = 0 if replica.chunks else 1
    agreement = StepAgreement(RunMode.EAGER, None, [num_tokens], uniform)
    return StepPlan(0, step_id, agreement, [replica], num_steps)


def padded(step_id: int, replica: ReplicaPlan, size: int) -> StepPlan:
    """A decode step of ``size`` lanes, those beyond the replica's own being padding."""
    agreement = StepAgreement(RunMode.EAGER, size, [size], 1)
    return StepPlan(0, step_id, agreement, [replica])


def full(step_id: int, replica: ReplicaPlan, size: int, *, num_steps: int = 1) -> StepPlan:
    agreement = StepAgreement(RunMode.FULL, size, [size], 1)
    return StepPlan(0, step_id, agreement, [replica], num_steps)


def any_batch(run_mode: RunMode, step_id: int, replica: ReplicaPlan, size: int) -> StepPlan:
    """A step of any tokens, in a graph of ``size``."""
    return StepPlan(0, step_id, StepAgreement(run_mode, size, [size], 0), [replica])


def tokens_of(result: StepResult) -> list[int | None]:
    """The token of each lane, None where it got none."""
    pairs = zip(unpack_ids(result.counts), unpack_ids(result.token_ids), strict=True)
    return [token if count else None for count, token in pairs]
