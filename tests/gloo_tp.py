"""The least of a communicator, over the default process group of ``run_ranks``."""

from typing import Any

import torch
import torch.distributed as dist
from ranks import Rank
from torch import Tensor


class GlooTP:
    def __init__(self, rank: Rank) -> None:
        self.rank = rank.rank
        self.size = rank.size

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_reduce_add_norm(self, x: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        return norm.add(self.all_reduce(x), residual)

    def columns(self, x: Tensor) -> Tensor:
        """[n, local] on each rank -> [n, all], in rank order."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)
