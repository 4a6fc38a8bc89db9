"""From what the user set to what a rank is given: reads the model's files, makes "auto" concrete.

``plan_worker`` is pure; ``resolve`` adds the looking around (is there a GPU, what is the model).
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from lockstep.comm.all_reduce.table import check_table
from lockstep.launcher.config import Device, LaunchConfig
from lockstep.launcher.engine import Progress
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.gpu import Capability, gpu_capability
from lockstep.launcher.step_limits import check_token_each, tokens_in_step
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.attention.registry import backend_for
from lockstep.worker.config import (
    MIN_BLOCKS,
    CacheConfig,
    Dtype,
    GraphConfig,
    ModelConfig,
    ScheduleConfig,
    WorkerConfig,
)
from lockstep.worker.graphs.dispatch import create_dispatcher
from lockstep.worker.graphs.mode import GraphMode, requested_mode, resolve_mode
from lockstep.worker.models.footprint import Footprint
from lockstep.worker.models.registry import check_split
from lockstep.worker.weights.files import check_weights
from lockstep.worker.weights.generation import GenerationDefaults, read_generation_defaults
from lockstep.worker.weights.model_config import model_config_from
from lockstep.worker.weights.resolve import resolve_model

CPU_KV_BYTES = 1 << 30
RUN_AHEAD = 2
_DTYPES: dict[str, Dtype] = {"half": "float16", "float": "float32"}


class DeviceDefaults(msgspec.Struct, frozen=True):
    """Limits when the user sets none. A CPU rank captures its sizes at a second each."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


DEFAULTS: dict[Device, DeviceDefaults] = {
    "cpu": DeviceDefaults(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=4096),
    "cuda": DeviceDefaults(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=32768),
}


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's whole configuration, nothing left to choose. ``notes`` tell what was chosen."""

    launch: LaunchConfig
    worker: WorkerConfig
    device: Device
    generation: GenerationDefaults
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.worker.parallel.world_size


def resolve(
    config: LaunchConfig,
    *,
    progress: Progress | None = None,
    capability: Callable[[], Capability | None] = gpu_capability,
) -> Resolved:
    """Fetch the model if need be, read its shape, and fix every setting.

    Raises:
        ConfigError: the model cannot be found or served, or settings do not fit it.
    """
    found = capability() if config.device != "cpu" else None
    device: Device = config.device if config.device != "auto" else ("cuda" if found else "cpu")
    try:
        path = str(resolve_model(config.model, progress=progress))
        check_weights(Path(path), config.load_format)
        model = model_config_from(path)
        worker, notes = plan_worker(config, model=model, path=path, device=device, capability=found)
        generation = read_generation_defaults(path)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    return Resolved(
        launch=config,
        worker=worker,
        device=device,
        generation=generation,
        notes=notes,
    )


def plan_worker(
    config: LaunchConfig,
    *,
    model: ModelConfig,
    path: str,
    device: Device,
    capability: Capability | None = None,
) -> tuple[WorkerConfig, tuple[str, ...]]:
    """Pure: the worker's configuration, and a note for every limit chosen here.

    Raises:
        ValueError: names the setting, its value and the limit.
    """
    check_split(model, config.tensor_parallel_size)
    check_table(config.all_reduce, device)
    schedule, notes = _schedule(config, model, DEFAULTS[device])
    graph, reasons = _graph(config, device, capability)
    notes += (*reasons, *create_dispatcher(graph, schedule).warnings)
    worker = WorkerConfig(
        model=model,
        parallel=_parallel(config),
        cache=_cache(config, device),
        schedule=schedule,
        graph=graph,
        model_path=path,
        tokenizer_path=config.tokenizer or path,
        load_format=config.load_format,
        dtype=_dtype(config, model, device),
        attention_backend=config.attention_backend,
        all_reduce=config.all_reduce,
        compile=config.compile,
        step_timestamps=config.step_timestamps,
        seed=config.seed or 0,
    )
    _check_kv_bytes(worker)
    return worker, notes


def _check_kv_bytes(worker: WorkerConfig) -> None:
    cache = worker.cache
    if cache.kv_cache_memory_bytes is None or cache.num_gpu_blocks_override is not None:
        return
    model = msgspec.structs.replace(worker.model, dtype=worker.dtype)
    footprint = Footprint(model, worker.parallel.tp_size)
    least = MIN_BLOCKS * cache.block_size * footprint.kv_bytes_per_token
    if cache.kv_cache_memory_bytes < least:
        raise ValueError(
            f"kv_cache_memory_bytes must be at least {least}, got {cache.kv_cache_memory_bytes}: "
            f"{MIN_BLOCKS} blocks of {cache.block_size} tokens"
        )


def _parallel(config: LaunchConfig) -> ParallelConfig:
    return ParallelConfig(
        tp_size=config.tensor_parallel_size,
        dp_size=config.data_parallel_size,
        dp_lockstep=config.dp_lockstep,
        verify_agreement=config.verify_agreement,
        timeout_s=config.distributed_timeout_seconds,
    )


def _cache(config: LaunchConfig, device: Device) -> CacheConfig:
    kv_bytes = config.kv_cache_memory_bytes
    if device == "cpu" and kv_bytes is None:
        kv_bytes = CPU_KV_BYTES
    return CacheConfig(
        block_size=config.block_size,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=kv_bytes,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def _schedule(
    config: LaunchConfig, model: ModelConfig, defaults: DeviceDefaults
) -> tuple[ScheduleConfig, tuple[str, ...]]:
    length, notes = _max_model_len(config.max_model_len, model, defaults)
    seqs = config.max_num_seqs or defaults.max_num_seqs
    tokens = tokens_in_step(config.max_num_batched_tokens, defaults.max_num_batched_tokens, seqs)
    check_token_each(seqs, tokens)
    run_ahead = RUN_AHEAD if config.run_ahead is None else config.run_ahead
    schedule = ScheduleConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        run_ahead=run_ahead if config.async_scheduling else 0,
        max_prefill_defer_steps=config.max_prefill_defer_steps,
        max_queued_requests=config.max_num_queued_reqs,
        preempt=config.preemption,
        seed=config.seed,
    )
    return schedule, notes


def _max_model_len(
    asked: int | None, model: ModelConfig, defaults: DeviceDefaults
) -> tuple[int, tuple[str, ...]]:
    limit = model.max_position_embeddings
    if asked is not None and asked > limit:
        raise ValueError(f"max_model_len must be at most the model's {limit}, got {asked}")
    if asked is not None or limit <= defaults.max_model_len:
        return asked or limit, ()
    length = defaults.max_model_len
    return length, (f"max_model_len {length} of the model's {limit} (--max-model-len sets it)",)


def asked_mode(config: LaunchConfig) -> GraphMode:
    """The graph mode that the user asked for, which may not be able to run."""
    if config.enforce_eager:
        return GraphMode.NONE
    return requested_mode(config.cudagraph_mode, config.optimization_level)


def _graph(
    config: LaunchConfig, device: Device, capability: Capability | None
) -> tuple[GraphConfig, tuple[str, ...]]:
    """Graphs that can run here, and what there is to say where they are not those asked for."""
    backend = backend_for(config.attention_backend, device)
    resolved = resolve_mode(asked_mode(config), backend.support, 1, piecewise_available=True)
    graph = GraphConfig(
        mode=resolved.mode.value,
        capture_sizes=config.cudagraph_capture_sizes,
        max_capture_size=config.max_cudagraph_capture_size,
        performance_mode=config.performance_mode,
        capture=config.capture,
    )
    # A driver without a GPU may start ranks that have one; the grid's standard top then stands.
    if capability is not None:
        graph = msgspec.structs.replace(graph, compute_capability=capability)
    idle = config.capture == "lazy" and resolved.mode is GraphMode.NONE
    idle_note = ("capture lazy captures nothing: the graph mode is NONE",) if idle else ()
    return graph, (*resolved.reasons, *idle_note)


def _dtype(config: LaunchConfig, model: ModelConfig, device: Device) -> Dtype:
    if config.dtype == "auto":
        return "float32" if device == "cpu" else model.dtype
    return _DTYPES.get(config.dtype) or msgspec.convert(config.dtype, Dtype)
