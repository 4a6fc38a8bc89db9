"""Builds the parts of a rank from its configuration."""

import torch

from lockstep.parallel.shard import HeadLayout
from lockstep.parallel.topology import Topology
from lockstep.worker.attention.base import AttentionBackend, AttentionSizes, create_backend
from lockstep.worker.bodies import RunnerParts
from lockstep.worker.config import ScheduleConfig, WorkerConfig
from lockstep.worker.graphs.runner import GraphRunner
from lockstep.worker.kv_cache import KVCache, KVLayout
from lockstep.worker.lanes import LaneTable
from lockstep.worker.masks import LaneMasks
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.models.registry import model_class
from lockstep.worker.sampler import Sampler
from lockstep.worker.sampling_state import LaneSampling
from lockstep.worker.state import StepState
from lockstep.worker.step import Step
from lockstep.worker.step_graphs import StepGraphs
from lockstep.worker.step_inputs import StepInputs
from lockstep.worker.upload import Uploader

_CALLS_PER_PLAN = 4


def torch_dtype(config: WorkerConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def kv_layout(config: WorkerConfig) -> KVLayout:
    """Layout of this rank's share of the KV heads."""
    model = config.model
    heads = HeadLayout(model.num_heads, model.num_kv_heads, config.parallel.tp_size)
    return KVLayout(
        num_layers=model.num_layers,
        block_size=config.cache.block_size,
        num_kv_heads=heads.num_kv_heads_local,
        head_dim=model.head_dim,
        dtype=torch_dtype(config),
    )


def build_model(
    config: WorkerConfig, topology: Topology, backend: AttentionBackend, device: torch.device
) -> DecoderModel:
    """The model with zero weights."""
    build = model_class(config.model.architecture)
    return build(
        config.model,
        topology.tp.outside_compilation() if config.compile else topology.tp,
        backend,
        device,
        torch_dtype(config),
        max_positions=config.schedule.max_model_len,
    )


def build_attention(config: WorkerConfig, device: torch.device) -> AttentionBackend:
    model, schedule = config.model, config.schedule
    heads = HeadLayout(model.num_heads, model.num_kv_heads, config.parallel.tp_size)
    sizes = AttentionSizes(
        num_heads=heads.num_heads_local,
        num_kv_heads=heads.num_kv_heads_local,
        head_dim=model.head_dim,
        block_size=config.cache.block_size,
        max_num_reqs=schedule.max_num_seqs,
        max_num_tokens=schedule.max_num_batched_tokens,
        max_model_len=schedule.max_model_len,
        dtype=torch_dtype(config),
        device=device,
    )
    return create_backend(config.attention_backend, sizes)


def build_parts(
    config: WorkerConfig,
    topology: Topology,
    model: DecoderModel,
    kv: KVCache,
    graph_runner: GraphRunner,
) -> RunnerParts:
    """Everything a ModelRunner drives, allocated at its largest size."""
    schedule, device = config.schedule, kv.storage.device
    max_lanes, width = schedule.max_num_seqs, max_blocks_per_req(config)
    depth = schedule.run_ahead + 2
    state = StepState(
        max_lanes=max_lanes,
        max_tokens=schedule.max_num_batched_tokens,
        max_blocks_per_req=width,
        vocab_local=model.vocab_local,
        ring_depth=depth,
        num_replicas=topology.dp.size,
        device=device,
        num_timestamps=config.step_timestamps,
    )
    sampling = LaneSampling(
        max_lanes,
        vocab_start=model.vocab_start,
        vocab_local=model.vocab_local,
        vocab_size=config.model.vocab_size,
        device=device,
    )
    inputs = StepInputs(state, kv.block_size, schedule.max_model_len)
    step = Step(model, kv, state, Sampler(sampling, topology.tp), topology.dp)
    return RunnerParts(
        spec=topology.spec,
        state=state,
        sampling=sampling,
        lanes=LaneTable(max_lanes, width),
        upload=Uploader(_upload_capacity(schedule), _CALLS_PER_PLAN * depth, device),
        masks=LaneMasks(
            max_lanes,
            vocab_start=model.vocab_start,
            vocab_size=config.model.vocab_size,
            device=device,
        ),
        inputs=inputs,
        step=step,
        graphs=StepGraphs(graph_runner, step, inputs, sampling),
    )


def max_blocks_per_req(config: WorkerConfig) -> int:
    return -(-config.schedule.max_model_len // config.cache.block_size)


def _upload_capacity(schedule: ScheduleConfig) -> int:
    """A step of only prompt tokens, or a change of every lane."""
    return 2 * schedule.max_num_batched_tokens + 8 * schedule.max_num_seqs
