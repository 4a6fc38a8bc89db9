"""From logits to one token a lane, over vocabulary shards, without a host sync.

Every shape and every kernel is fixed by (num_reqs, variant), so a CUDA graph can hold it all.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lockstep.worker.draw import draw, draw_filtered, draw_splits
from lockstep.worker.filters import adjust
from lockstep.worker.logprobs import LogprobTensors, logprobs_of
from lockstep.worker.sampling_state import LaneSampling, Variant


class ShardGather(Protocol):
    """What the sampler needs of a ``Communicator`` over the ranks that share a vocabulary."""

    @property
    def size(self) -> int: ...

    def all_gather(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """``finite`` False: the row's logits were unusable and token 0 is not to be believed."""

    token_ids: Tensor  # [num_reqs] int64, always inside the vocabulary
    finite: Tensor  # [num_reqs] bool; True for inactive rows
    logprobs: LogprobTensors | None


class Sampler:
    """Samples for the lanes of ``lanes``, with the ranks of ``tp`` holding a vocabulary shard each.

    Shards are equal in size, in rank order, and all ranks return the same. GREEDY and PLAIN
    exchange one candidate a lane; FILTERED exchanges logits, LOGPROBS does so twice.
    """

    def __init__(self, lanes: LaneSampling, tp: ShardGather) -> None:
        self.lanes = lanes
        self.tp = tp

    def sample(self, logits: Tensor, active: Tensor, variant: Variant) -> SampleOutput:
        """One token for each row; row i is lane i.

        Args:
            logits: [num_reqs, vocab_local] float32, left as it is; padded columns are -inf.
            active: [num_reqs] bool; other rows may hold anything and give token 0.
            variant: at least ``lanes.variant()``.
        """
        scores, ids = self.candidates(logits, variant)
        best = scores.max(dim=-1, keepdim=True)
        finite = best.values[:, 0].isfinite()
        token_ids = ids.gather(1, best.indices)[:, 0].to(torch.int64)
        token_ids = torch.where(finite & active, token_ids, 0)
        logprobs = self.logprobs(logits, token_ids, variant)
        return SampleOutput(token_ids, finite | ~active, logprobs)

    def candidates(self, logits: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
        """Scores and ids, both [num_reqs, n]: a row's token is the id of its first best score.

        A row whose best score is not finite has no token. Ids come in any dtype that holds them.
        """
        if variant < Variant.FILTERED:
            return self._candidates_over_shards(logits, variant)
        adjusted = self._gather_vocab(adjust(logits, self.lanes))
        return draw_filtered(adjusted, self.lanes, variant)

    def logprobs(
        self, logits: Tensor, token_ids: Tensor, variant: Variant
    ) -> LogprobTensors | None:
        """Of raw ``logits`` and sampled tokens, if the variant reports them."""
        if variant is not Variant.LOGPROBS:
            return None
        return logprobs_of(self._gather_vocab(logits), token_ids, self.lanes.vocab_size)

    def advance(self, output: SampleOutput, active: Tensor, variant: Variant) -> Tensor:
        """Count the tokens, move positions on, and tell which lanes end with this token.

        Inactive lanes keep their state bit for bit.

        Returns:
            [num_reqs] bool: lanes that drew a stop id (from min_tokens on) or had bad logits.
        """
        num_reqs = active.shape[0]
        position = self.lanes.position[:num_reqs]
        counted = active & output.finite
        hit = (output.token_ids[:, None] == self.lanes.stop_ids[:num_reqs]).any(dim=-1)
        stopped = hit & (position >= self.lanes.min_tokens[:num_reqs])
        if variant >= Variant.FILTERED:
            self._count_tokens(output.token_ids, counted)
        position.add_(counted)
        return active & (stopped | ~output.finite)

    def _candidates_over_shards(self, logits: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
        start = self.lanes.vocab_start
        if self.tp.size == 1:
            return draw_splits(logits, self.lanes, start=start, variant=variant)
        scores, ids = draw(logits, self.lanes, start=start, variant=variant)
        # float32 holds ids below 2**24 exactly, and one collective is cheaper than two.
        gathered = self.tp.all_gather(torch.stack((scores, ids.to(scores.dtype))))
        return gathered[:, 0].T, gathered[:, 1].T

    def _gather_vocab(self, logits: Tensor) -> Tensor:
        if self.tp.size == 1:
            return logits
        shards = self.tp.all_gather(logits)
        return shards.transpose(0, 1).reshape(logits.shape[0], -1)

    def _count_tokens(self, token_ids: Tensor, counted: Tensor) -> None:
        local, held = self.lanes.to_local(token_ids)
        amount = 2 * (held & counted).to(torch.int32)
        self.lanes.history[: len(token_ids)].scatter_add_(1, local[:, None], amount[:, None])
