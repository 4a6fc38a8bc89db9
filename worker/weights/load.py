"""Fills a model from its weights: finds the source, checks every tensor, reads this rank's part."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.parallel.weight_shard import WeightShard
from lockstep.worker.config import WorkerConfig
from lockstep.worker.models.decoder import DecoderModel
from lockstep.worker.weights.dummy import DummySource
from lockstep.worker.weights.files import is_gguf
from lockstep.worker.weights.progress import Progress
from lockstep.worker.weights.source import TensorSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a rank read. ``num_bytes`` counts this rank's parts in the checkpoint's own dtype."""

    num_tensors: int
    num_bytes: int
    seconds: float


def load_weights(
    model: DecoderModel, config: WorkerConfig, progress: Progress | None = None
) -> LoadReport:
    """Fill ``model`` from ``config.model_path``, or with random weights for "dummy".

    Args:
        progress: called with ("weights", tensors done, tensors in all).

    Raises:
        ValueError: a tensor is missing or has the wrong shape (named), or a file is damaged.
    """
    started = time.perf_counter()
    weights = list(model.weight_shards())
    source = open_source(config, weights, weights[0].target.device)
    check(source, weights, config.model_path)
    num_bytes = 0
    for done, weight in enumerate(weights):
        if progress:
            progress("weights", done, len(weights))
        num_bytes += _fill(weight, source)
    _settle(weights[0].target.device)
    if progress:
        progress("weights", len(weights), len(weights))
    return LoadReport(len(weights), num_bytes, time.perf_counter() - started)


def open_source(
    config: WorkerConfig, weights: Sequence[WeightShard], device: torch.device
) -> TensorSource:
    """The source that ``load_format`` names; "auto" goes by what the path is.

    Args:
        device: where dummy weights are drawn.
    """
    path = Path(config.model_path)
    if config.load_format == "dummy":
        return _dummy(config, weights, device)
    if is_gguf(path, config.load_format):
        from lockstep.worker.weights.gguf import GGUFSource

        return GGUFSource(path)
    from lockstep.worker.weights.safetensors import SafetensorsSource

    return SafetensorsSource(path)


def _dummy(
    config: WorkerConfig, weights: Sequence[WeightShard], device: torch.device
) -> DummySource:
    return DummySource(
        {weight.name: weight.shape for weight in weights},
        std=config.model.initializer_range,
        seed=config.seed,
        device=device,
        dtype=weights[0].target.dtype,
    )


def check(source: TensorSource, weights: Sequence[WeightShard], where: str) -> None:
    """Compare names and shapes before anything is read.

    Raises:
        ValueError: names the first tensor that is missing or has another shape.
    """
    names = set(source.names())
    for weight in weights:
        if weight.name not in names:
            raise ValueError(f"tensor {weight.name!r} is missing from {where}")
        shape = source.shape(weight.name)
        if shape != weight.shape:
            raise ValueError(
                f"tensor {weight.name!r} in {where} has shape {shape}; "
                f"the model's config asks for {weight.shape}"
            )
    extra = sorted(names - {weight.name for weight in weights})
    if extra:
        logger.debug("%s holds %d tensors that are not used: %s", where, len(extra), extra)


def _fill(weight: WeightShard, source: TensorSource) -> int:
    shard = weight.shard
    if not shard.length:
        return 0
    part = source.read(weight.name, shard.dim, shard.start, shard.length)
    weight.target.narrow(shard.dim, 0, shard.length).copy_(part)
    return part.nbytes


def _settle(device: torch.device) -> None:
    """Wait for the copies and give back what they borrowed: the KV cache takes what is free."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
