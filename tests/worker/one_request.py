"""A model that computes one request at a time: what a test needs instead of a worker."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.config import ParallelConfig
from lockstep.worker.attention.base import AttentionSizes, create_backend
from lockstep.worker.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ScheduleConfig,
    WorkerConfig,
)
from lockstep.worker.forward import AttentionMetadata, ForwardInputs
from lockstep.worker.kv_cache import KVCache, KVLayout
from lockstep.worker.models.registry import model_class
from lockstep.worker.weights.load import load_weights

BLOCK_SIZE = 4
CPU = torch.device("cpu")


class OneRank:
    """Stands for a communicator of size 1, or for one rank of many that never talks."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        return norm.add(x, residual)


def worker_config(
    model: ModelConfig, path: Path | str = "", *, tp_size: int = 1, load_format: str = "auto"
) -> WorkerConfig:
    return WorkerConfig(
        model=model,
        parallel=ParallelConfig(tp_size=tp_size),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        schedule=ScheduleConfig(),
        graph=GraphConfig(),
        model_path=str(path),
        load_format=load_format,
        dtype="float32",
    )


def new_model(
    config: ModelConfig,
    tp: Any = None,
    *,
    max_tokens: int = 128,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> Any:
    tp = tp or OneRank()
    sizes = AttentionSizes(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        max_num_reqs=1,
        max_num_tokens=max_tokens,
        max_model_len=max_tokens,
        dtype=dtype,
        device=device,
    )
    backend = create_backend("auto", sizes)
    build = model_class(config.architecture)
    return build(config, tp, backend, device, dtype, max_positions=max_tokens)


class OneRequest:
    """Feeds tokens to a model in order; blocks are taken from the highest down."""

    def __init__(self, model: Any, *, max_tokens: int = 128) -> None:
        weight = model.lm_head.weight
        config, self.device = model.config, weight.device
        num_blocks = -(-max_tokens // BLOCK_SIZE) + 1
        layout = KVLayout(
            config.num_layers, BLOCK_SIZE, model.num_kv_heads_local, config.head_dim, weight.dtype
        )
        self.model = model
        self.kv = KVCache.allocate(layout, num_blocks, self.device)
        self.table = torch.arange(num_blocks - 1, 0, -1, dtype=torch.int32, device=self.device)
        self.context_len = 0

    @torch.inference_mode()
    def forward(self, ids: Sequence[int]) -> Tensor:
        """Logits of the next tokens of the request, [len(ids), vocab_local]."""
        first, self.context_len = self.context_len, self.context_len + len(ids)
        positions = torch.arange(first, self.context_len, device=self.device)
        token_ids = torch.tensor(ids, device=self.device)
        inputs = ForwardInputs(token_ids, positions, self._attention(positions), None)
        return self.model.logits(self.model(inputs, self.kv))

    def _attention(self, positions: Tensor) -> AttentionMetadata:
        blocks = self.table[positions // BLOCK_SIZE]
        count = positions.shape[0]
        return AttentionMetadata(
            slots=blocks.long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=self.device),
            context_lens=torch.tensor([self.context_len], dtype=torch.int32, device=self.device),
            block_table=self.table.unsqueeze(0),
            max_query_len=count,
            max_context_len=self.table.shape[0] * BLOCK_SIZE,
        )


def loaded(config: WorkerConfig, tp: Any = None, **options: Any) -> Any:
    model = new_model(config.model, tp, **options)
    load_weights(model, config)
    return model


def greedy(model: Any, prompt: Sequence[int], count: int, stop: int | None = None) -> list[int]:
    request = OneRequest(model, max_tokens=len(prompt) + count)
    logits, output = request.forward(prompt), []
    while len(output) < count:
        output.append(int(logits[-1].argmax()))
        if output[-1] == stop:
            break
        logits = request.forward(output[-1:])
    return output
