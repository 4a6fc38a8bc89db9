"""A resolved configuration without model files."""

from types import SimpleNamespace

from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.resolve import Resolved
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ScheduleConfig,
    WorkerConfig,
)


def resolved_config(
    *, tp=1, dp=1, device="cpu", model_path="none", placement_timeout_seconds=120.0
) -> Resolved:
    model = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=101, hidden_size=32, intermediate_size=64,
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position_embeddings=256,
        dtype="float32",
    )  # fmt: skip
    worker = WorkerConfig(
        model=model,
        parallel=ParallelConfig(tp_size=tp, dp_size=dp, timeout_s=20.0),
        cache=CacheConfig(block_size=4, num_gpu_blocks_override=64),
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128),
        graph=GraphConfig(mode="NONE"),
        model_path=str(model_path),
        tokenizer_path=str(model_path),
        load_format="dummy",
        dtype="float32",
    )
    return Resolved(
        launch=LaunchConfig(model="dummy", placement_timeout_seconds=placement_timeout_seconds),
        worker=worker, device=device, generation=SimpleNamespace(),
    )  # fmt: skip
