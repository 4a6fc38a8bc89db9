"""What changes a lane's distribution: stop ids held back, biases, penalties, top_k, top_p, min_p.

The order is vLLM's. Rows that ask for nothing come out bit-equal, NaN included, so that a lane
gets the same token whether or not a filtered one shares its batch. All sums are of integers:
their result does not depend on the order, and so not on the batch.
"""

import torch
from torch import Tensor

from lockstep.worker.sampling_state import LaneSampling

_MINUS_INF = float("-inf")
# Probability mass in units of 2**-34 of the best token: a sum over 2**18 ids is exact in float64.
_MASS_SCALE = 2.0**34


def adjust(logits: Tensor, lanes: LaneSampling) -> Tensor:
    """Logits of this rank's shard with min_tokens, logit_bias and penalties applied.

    Args:
        logits: [num_reqs, vocab_local] float32; left as it is.
    """
    if logits.is_cuda:
        from lockstep.worker.kernels import adjust as kernels

        return kernels.adjust(logits, lanes)
    return adjust_torch(logits, lanes)


def adjust_torch(logits: Tensor, lanes: LaneSampling) -> Tensor:
    """``adjust`` on any device."""
    num_reqs = logits.shape[0]
    adjusted = logits.clone()
    _hold_back_stops(adjusted, lanes, num_reqs)
    _add_biases(adjusted, lanes, num_reqs)
    return _penalise(adjusted, lanes, num_reqs)


def cut(logits: Tensor, lanes: LaneSampling) -> Tensor:
    """Put -inf for every token that min_p, top_k or top_p leave out; in place.

    Tokens equal in logit are kept or left out together, and the best one is always kept.

    Args:
        logits: [num_reqs, vocabulary] float32, over all shards.
    """
    least = _least_kept(logits, lanes)
    # Written as "below", not as "not at least": a NaN must survive, to be noticed.
    return logits.masked_fill_(logits < least[:, None], _MINUS_INF)


def _hold_back_stops(logits: Tensor, lanes: LaneSampling, num_reqs: int) -> None:
    local, held = lanes.to_local(lanes.stop_ids[:num_reqs])
    early = lanes.position[:num_reqs] < lanes.min_tokens[:num_reqs]
    # Adding -0.0 for unused places is exact, and needs no spare column to write to.
    logits.scatter_add_(1, local, torch.where(held & early[:, None], _MINUS_INF, -0.0))


def _add_biases(logits: Tensor, lanes: LaneSampling, num_reqs: int) -> None:
    local, held = lanes.to_local(lanes.bias_ids[:num_reqs])
    logits.scatter_add_(1, local, torch.where(held, lanes.bias_values[:num_reqs], -0.0))


def _penalise(logits: Tensor, lanes: LaneSampling, num_reqs: int) -> Tensor:
    history = lanes.history[:num_reqs]
    repetition = lanes.repetition_penalty[:num_reqs, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(history > 0, repeated, logits)
    count = history >> 1
    logits = logits - lanes.frequency_penalty[:num_reqs, None] * count
    return logits - lanes.presence_penalty[:num_reqs, None] * (count > 0)


def _least_kept(logits: Tensor, lanes: LaneSampling) -> Tensor:
    num_reqs = logits.shape[0]
    temperature = lanes.temperature[:num_reqs]
    ordered = logits.sort(dim=-1, descending=True).values
    by_min_p = _least_by_min_p(ordered[:, 0], temperature, lanes.min_p[:num_reqs])
    top_k = lanes.top_k[:num_reqs]
    kth = ordered.gather(1, (top_k - 1)[:, None])[:, 0]
    by_top_k = torch.where(top_k < lanes.vocab_size, kth, _MINUS_INF)
    least = torch.maximum(by_min_p, by_top_k)
    top_p = lanes.top_p[:num_reqs]
    by_top_p = _least_by_top_p(ordered, least, temperature, top_p)
    return torch.where(top_p < 1, torch.maximum(least, by_top_p), least)


def _least_by_min_p(best: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    # p / p_best >= min_p, in logits. Off must be told apart: 0 * log(0) is NaN for a greedy row.
    return torch.where(min_p > 0, best + temperature * min_p.log(), _MINUS_INF)


def _least_by_top_p(ordered: Tensor, least: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    scale = torch.where(temperature > 0, temperature, 1.0)[:, None]
    weight = ((ordered - ordered[:, :1]) / scale).exp_().nan_to_num_(nan=0.0)
    weight.masked_fill_(ordered < least[:, None], 0.0)
    mass = (weight.double() * _MASS_SCALE).to(torch.int64)
    through = mass.cumsum(dim=-1)
    limit = through[:, -1:].double() * top_p[:, None].double()
    num_kept = ((through - mass).double() < limit).sum(dim=-1, keepdim=True)
    return ordered.gather(1, (num_kept - 1).clamp_(min=0))[:, 0]
