"""Log-probabilities of sampled tokens and of the best ones beside them, from raw logits."""

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.messages import TokenLogprobs
from lockstep.comm.sampling import MAX_LOGPROBS


class LogprobTensors(NamedTuple):
    """One row a lane; the same shapes for every request, so that a ring can hold them.

    ``rank`` is 1 for the most likely token. ``top_ids`` and ``top_logprobs`` are [num_reqs, n],
    n = min(MAX_LOGPROBS, vocab_size), best first, the lower id first among equals.
    """

    logprob: Tensor  # [num_reqs] float32
    rank: Tensor  # [num_reqs] int64
    top_ids: Tensor  # [num_reqs, n] int64
    top_logprobs: Tensor  # [num_reqs, n] float32

    def of_lane(self, lane: int, token_id: int, num_logprobs: int) -> TokenLogprobs:
        """The wire form of one lane's row. Call it on tensors copied to the host.

        Tokens that the lane may not sample, with probability 0, are no alternatives.
        """
        possible = int(self.top_logprobs[lane].isfinite().sum())
        num_logprobs = min(num_logprobs, possible)
        return TokenLogprobs(
            token_id=token_id,
            logprob=self.logprob[lane].item(),
            rank=int(self.rank[lane].item()),
            top_ids=self.top_ids[lane, :num_logprobs].tolist(),
            top_logprobs=self.top_logprobs[lane, :num_logprobs].tolist(),
        )


def logprobs_of(logits: Tensor, token_ids: Tensor, vocab_size: int) -> LogprobTensors:
    """Log-softmax over the whole vocabulary, before temperature, penalties and filters.

    Args:
        logits: [num_reqs, at least vocab_size] float32, over all shards; padded columns are last.
        token_ids: [num_reqs] int64, the sampled tokens.
    """
    logits = logits[:, :vocab_size]
    logprobs = logits.log_softmax(dim=-1)
    chosen = logits.gather(1, token_ids[:, None])
    top_ids = _best_ids(logits, min(MAX_LOGPROBS, vocab_size))
    return LogprobTensors(
        logprob=logprobs.gather(1, token_ids[:, None])[:, 0],
        rank=(logits > chosen).sum(dim=-1) + 1,
        top_ids=top_ids,
        top_logprobs=logprobs.gather(1, top_ids),
    )


def _best_ids(logits: Tensor, count: int) -> Tensor:
    # topk may order equals as it likes; (logit, lowest id) as one integer has no equals.
    bits = (logits + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64).mul_(1 << 32)
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = keys.bitwise_or_(0xFFFFFFFF - ids).topk(count, dim=-1).values
    return 0xFFFFFFFF - (best & 0xFFFFFFFF)
