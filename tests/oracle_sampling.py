"""Naive sampling in plain Python, one row at a time: what the sampler is compared with."""

import math
from collections.abc import Sequence

from lockstep.comm.sampling import SamplingParams

_MASK = 0xFFFFFFFF


def fmix32(word: int) -> int:
    """MurmurHash3's 32-bit finaliser on a Python integer."""
    word ^= word >> 16
    word = word * 0x85EBCA6B & _MASK
    word ^= word >> 13
    word = word * 0xC2B2AE35 & _MASK
    return word ^ word >> 16


def noise_bits(seed: int, position: int, token_id: int) -> int:
    """The 32 random bits of one (seed, output position, vocabulary id)."""
    low, high = seed & _MASK, seed >> 32 & _MASK
    key_1 = fmix32(fmix32((position + 0x9E3779B9) & _MASK) ^ low)
    key_2 = fmix32(fmix32((key_1 + 0x9E3779B9) & _MASK) ^ high)
    return fmix32(fmix32(token_id ^ key_1) ^ key_2)


def gumbel(seed: int, position: int, token_id: int) -> float:
    uniform = ((noise_bits(seed, position, token_id) & 0x7FFFFFFF) + 0.5) / 2**31
    return -math.log(-math.log1p(-uniform))


def adjusted_logits(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int],
    outputs: Sequence[int], stop_ids: Sequence[int] = (),
) -> list[float]:  # fmt: skip
    """min_tokens, then logit_bias, then repetition, frequency and presence penalties."""
    result = []
    for token_id, logit in enumerate(logits):
        if token_id in stop_ids and len(outputs) < params.min_tokens:
            logit = -math.inf
        logit += (params.logit_bias or {}).get(token_id, 0.0)
        count = list(outputs).count(token_id)
        if count or token_id in prompt:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= params.frequency_penalty * count
        result.append(logit - params.presence_penalty * (count > 0))
    return result


def distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Probability of every id by temperature, min_p, top_k, top_p, in this order."""
    best = max(logits)
    if params.is_greedy:
        return [float(i == list(logits).index(best)) for i in range(len(logits))]
    weights = [math.exp((x - best) / params.temperature) for x in logits]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    if 0 < params.top_k < len(logits):
        kth = sorted(weights, reverse=True)[params.top_k - 1]
        weights = [w if w >= kth else 0.0 for w in weights]
    total = math.fsum(weights)
    kept = [math.fsum(v for v in weights if v > w) < params.top_p * total for w in weights]
    weights = [
        w if keep or params.top_p == 1 else 0.0 for w, keep in zip(weights, kept, strict=True)
    ]
    return [w / math.fsum(weights) for w in weights]


def draw(logits: Sequence[float], params: SamplingParams, seed: int, position: int) -> int:
    """The Gumbel-max token among those that the filters keep."""
    probabilities = distribution(logits, params)
    scores = [
        logit + params.temperature * gumbel(seed, position, i) if probabilities[i] else -math.inf
        for i, logit in enumerate(logits)
    ]
    return scores.index(max(scores))
