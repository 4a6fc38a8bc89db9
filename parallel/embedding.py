"""Embedding and LM head, split over the vocabulary."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lockstep.parallel.placement import Placement
from lockstep.parallel.shard import vocab_shard
from lockstep.parallel.weight_shard import WeightShard


class VocabParallelEmbedding(nn.Module):
    """Token ids [num_tokens] to vectors [num_tokens, hidden_size], equal on all ranks.

    A rank's table has a zero row on either side of its own: ids of other ranks are clamped onto
    them, so the sum over ranks needs no mask.
    """

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement) -> None:
        super().__init__()
        self.tp = place.tp
        self.linear = place.linear
        self.shape = (vocab_size, hidden_size)
        self.shard = vocab_shard(vocab_size, self.tp.size, self.tp.rank)
        self.start = self.tp.rank * self.shard.local_size
        self.table = place.parameter(self.shard.local_size + 2, hidden_size)

    @property
    def weight(self) -> Tensor:
        """This rank's rows, [vocab_local, hidden_size]."""
        return self.table[1:-1]

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self.linear.look_up(token_ids, self.weight)
        before = self.start - 1
        rows = token_ids.clamp(before, self.start + self.shard.local_size) - before
        return self.tp.all_reduce(self.linear.look_up(rows, self.table))

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield WeightShard(f"{name}.weight", self.shape, self.weight, self.shard)


class ParallelLMHead(nn.Module):
    """Hidden [n, hidden_size] to this rank's logits [n, vocab_local] in float32.

    Columns past the vocabulary are -inf, so no sampler can choose them, however low the others.
    A tied head reads the embedding's rows and has no weight of its own.
    """

    def __init__(self, embedding: VocabParallelEmbedding, *, tied: bool) -> None:
        super().__init__()
        self.shape = embedding.shape
        self.linear = embedding.linear
        self.start = embedding.start
        self.shard = embedding.shard
        self.tied = tied
        rows = embedding.weight
        self.weight = rows if tied else nn.Parameter(torch.zeros_like(rows), requires_grad=False)

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Into ``out``, if there is one: float32 [n, vocab_local], contiguous."""
        logits = self.linear.in_float32(hidden, self.weight, out)
        if self.shard.length < self.shard.local_size:
            logits[:, self.shard.length :] = float("-inf")
        return logits

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        if not self.tied:
            yield WeightShard(f"{name}.weight", self.shape, self.weight, self.shard)
