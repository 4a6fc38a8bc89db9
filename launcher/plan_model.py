"""How fast a decode step of a model can be at best: what it reads over what a GPU can read."""

from pathlib import Path

import msgspec

from lockstep.launcher.gpu_table import GpuModel, find_gpu
from lockstep.launcher.plan_options import PlanOptions
from lockstep.worker.models.floor import step_floor
from lockstep.worker.models.footprint import Footprint
from lockstep.worker.weights.model_config import model_config_from
from lockstep.worker.weights.resolve import resolve_config

_GPU, _CONTEXT_LEN = "H200", 1024
_SHOWN_REQS = (1, 4, 16, 64, 256, 1024)


class PlannedStep(msgspec.Struct, frozen=True):
    """A decode step of ``num_reqs`` requests; ``fits`` is whether a GPU holds what it reads."""

    num_reqs: int
    step_bytes: int
    floor_ms: float
    fits: bool


class ModelReport(msgspec.Struct, frozen=True):
    """Bytes are those of one rank. The floor leaves out arithmetic, launches and communication."""

    name: str
    gpu: str
    bandwidth_tb_s: float
    tensor_parallel_size: int
    context_len: int
    weight_bytes: int
    step_weight_bytes: int
    kv_bytes_per_token: int
    steps: tuple[PlannedStep, ...]


def model_report(options: PlanOptions, num_reqs: int | None) -> ModelReport | None:
    """Bytes and floors of ``--model``, for ``num_reqs`` requests or some usual numbers of them.

    Raises:
        ValueError: there is no such model or GPU, or it cannot be split so.
    """
    if options.model is None:
        return None
    config = model_config_from(_config_path(options.model))
    tp_size = options.tensor_parallel_size or 1
    context_len = options.context_len or min(_CONTEXT_LEN, config.max_position_embeddings)
    footprint = Footprint(config, tp_size)
    gpu = find_gpu(options.gpu or _GPU)
    counts = [num_reqs] if num_reqs else [n for n in _SHOWN_REQS if n <= options.max_num_seqs]
    return ModelReport(
        name=options.model,
        gpu=gpu.name,
        bandwidth_tb_s=gpu.bandwidth_tb_s,
        tensor_parallel_size=tp_size,
        context_len=context_len,
        weight_bytes=footprint.weight_bytes,
        step_weight_bytes=footprint.step_weight_bytes,
        kv_bytes_per_token=footprint.kv_bytes_per_token,
        steps=tuple(_step(footprint, count, context_len, gpu) for count in counts),
    )


def _config_path(name: str) -> Path:
    path = Path(name).expanduser()
    return path.parent if path.name == "config.json" else resolve_config(name)


def _step(footprint: Footprint, num_reqs: int, context_len: int, gpu: GpuModel) -> PlannedStep:
    floor = step_floor(footprint, num_reqs, context_len)
    held = footprint.weight_bytes + num_reqs * context_len * footprint.kv_bytes_per_token
    floor_ms = floor.ms(gpu.bandwidth_tb_s * 1e12)
    return PlannedStep(num_reqs, floor.num_bytes, floor_ms, held <= gpu.memory_gb * 1e9)
