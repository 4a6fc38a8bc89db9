"""Frozen configuration of a worker and of the scheduler that plans for it. No torch."""

from typing import Literal

import msgspec

from lockstep.parallel.config import ParallelConfig

Dtype = Literal["float32", "float16", "bfloat16"]
GraphModeName = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
# eager: before anybody is served; lazy: all but the largest in between.
CaptureTime = Literal["eager", "lazy"]


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


def _at_least(config: _Config, minimum: int, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        if value is not None and value < minimum:
            raise ValueError(f"{field} must be at least {minimum}, got {value}")


class RopeScaling(_Config, frozen=True, kw_only=True):
    """Llama-3 style scaling of rotary frequencies, or "linear" by ``factor``."""

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class ModelConfig(_Config, frozen=True, kw_only=True):
    """Shape of a dense decoder, whatever file it came from.

    ``sliding_window`` is a length in tokens (a query sees itself and window - 1 before it), or
    None; ``window_layers`` tells which layers use it (None: all).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    initializer_range: float = 0.02
    dtype: Dtype = "bfloat16"

    def window(self, layer_id: int) -> int | None:
        if self.window_layers is not None and not self.window_layers[layer_id]:
            return None
        return self.sliding_window


MIN_BLOCKS = 2  # the padding block and one to serve with


class CacheConfig(_Config, frozen=True, kw_only=True):
    """KV cache. ``kv_cache_memory_bytes`` and ``num_gpu_blocks_override`` replace measuring."""

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _at_least(self, 1, "block_size", "kv_cache_memory_bytes")
        _at_least(self, MIN_BLOCKS, "num_gpu_blocks_override")
        if not 0 < self.gpu_memory_utilization <= 1:
            value = self.gpu_memory_utilization
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {value}")


class ScheduleConfig(_Config, frozen=True, kw_only=True):
    """Limits of a step and of the queue. ``run_ahead`` 0 is the plain loop.

    ``preempt`` says whom a full pool preempts. ``seed`` makes the seeds of requests without one
    reproducible for the same requests in the same order; None draws them from the system.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 4096
    run_ahead: int = 2
    max_prefill_defer_steps: int = 8
    max_queued_requests: int | None = None
    preempt: Literal["youngest", "least_computed"] = "youngest"
    seed: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_num_seqs", "max_num_batched_tokens")
        _at_least(self, 2, "max_model_len")  # a prompt token and one of output
        _at_least(self, 0, "run_ahead", "max_prefill_defer_steps", "max_queued_requests")

    @property
    def async_scheduling(self) -> bool:
        return self.run_ahead > 0


class GraphConfig(_Config, frozen=True, kw_only=True):
    """``mode`` NONE is ``--enforce-eager``. Sizes None: the standard grid of ``graphs.grid``.

    ``compute_capability`` is that of the ranks' GPUs; it moves the top of the standard grid.
    With ``capture`` lazy ranks serve once the largest graphs exist.
    """

    mode: GraphModeName = "FULL_AND_PIECEWISE"
    capture_sizes: tuple[int, ...] | None = None
    max_capture_size: int | None = None
    compute_capability: tuple[int, int] = (9, 0)
    performance_mode: Literal["balanced", "interactivity", "throughput"] = "balanced"
    capture: CaptureTime = "eager"


class WorkerConfig(_Config, frozen=True, kw_only=True):
    """Everything a rank needs besides its RankSpec, and a scheduler to plan for it.

    ``model_path`` and ``tokenizer_path`` are local directories or files. ``step_timestamps`` is of
    how many steps the times on the device are kept; 0 notes none.
    """

    model: ModelConfig
    parallel: ParallelConfig
    cache: CacheConfig
    schedule: ScheduleConfig
    graph: GraphConfig
    model_path: str
    tokenizer_path: str = ""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    dtype: Dtype = "bfloat16"
    attention_backend: str = "auto"
    all_reduce: str = "auto"
    compile: bool = False
    step_timestamps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, 0, "step_timestamps")
