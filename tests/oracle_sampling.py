"""Naive sampling in plain Python, one row at a time: what the sampler is compared with."""

import math
from collections.abc import Sequence

import numpy as np

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
    """Standard Gumbel noise; the uniform is rounded to float32, as it is on a device."""
    low_bits = np.float32(noise_bits(seed, position, token_id) & 0x7FFFFFFF)
    uniform = np.float32(low_bits * np.float32(2.0**-31) + np.float32(2.0**-32))
    return -math.log(-math.log1p(-min(float(uniform), 1 - 2.0**-24)))


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
        kth = sorted(logits, reverse=True)[params.top_k - 1]
        weights = [w if x >= kth else 0.0 for w, x in zip(weights, logits, strict=True)]
    if params.top_p < 1:
        limit = params.top_p * math.fsum(weights)
        weights = [w if mass_above(x, logits, weights) < limit else 0.0
                   for w, x in zip(weights, logits, strict=True)]  # fmt: skip
    return [w / math.fsum(weights) for w in weights]


def mass_above(logit: float, logits: Sequence[float], weights: Sequence[float]) -> float:
    return math.fsum(w for w, x in zip(weights, logits, strict=True) if x > logit)


def draw(logits: Sequence[float], params: SamplingParams, seed: int, position: int) -> int:
    """The Gumbel-max token among those that the filters keep."""
    probabilities = distribution(logits, params)
    scores = [
        logit + params.temperature * gumbel(seed, position, i) if probabilities[i] else -math.inf
        for i, logit in enumerate(logits)
    ]
    return scores.index(max(scores))
