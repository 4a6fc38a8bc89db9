"""Gumbel noise that depends on (request seed, output position, vocabulary id) and nothing else.

A counter-based hash, so that no generator state has to be kept, moved with a lane, or agreed
between ranks. The mixer is fmix32, the finaliser of Austin Appleby's MurmurHash3 (public domain);
each of its two rounds takes one half of a 64-bit key made of seed and position. Everything up to
the logarithms is 32-bit integer arithmetic; ``worker.kernels.sample`` computes the same on CUDA.
"""

import torch
from torch import Tensor

MULTIPLIER_1 = 0x85EBCA6B
MULTIPLIER_2 = 0xC2B2AE35
GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: keeps position 0 and seed 0 away from fmix32(0)
LARGEST_BELOW_ONE = 1 - 2.0**-24

_SPAN = 1 << 32
_HALF_SPAN = 1 << 31


def gumbel(seed: Tensor, position: Tensor, start: int, count: int) -> Tensor:
    """Noise of ids ``start`` .. ``start + count - 1`` for each lane.

    Args:
        seed, position: [num_lanes] int64.

    Returns:
        [num_lanes, count] float32, finite.
    """
    key_1, key_2 = _lane_keys(seed, position)
    ids = torch.arange(start, start + count, dtype=torch.int32, device=seed.device)
    bits = _fmix32_(ids ^ key_1[:, None])
    bits = _fmix32_(bits.bitwise_xor_(key_2[:, None]))
    return _gumbel_of_bits(bits)


def _lane_keys(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    low, high = _to_int32(seed), _to_int32(seed >> 32)
    golden = _signed(GOLDEN)
    key_1 = _fmix32_(_fmix32_(_to_int32(position) + golden).bitwise_xor_(low))
    key_2 = _fmix32_(_fmix32_(key_1 + golden).bitwise_xor_(high))
    return key_1, key_2


def _gumbel_of_bits(bits: Tensor) -> Tensor:
    # The upper tail decides who wins. It is where the uniform is near 0, where floats are densest.
    uniform = bits.bitwise_and_(_HALF_SPAN - 1).to(torch.float32)
    uniform.mul_(2.0**-31).add_(2.0**-32).clamp_(max=LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _fmix32_(bits: Tensor) -> Tensor:
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
    bits.mul_(_signed(MULTIPLIER_1))
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF))
    bits.mul_(_signed(MULTIPLIER_2))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def _to_int32(values: Tensor) -> Tensor:
    low = values & (_SPAN - 1)
    return torch.where(low < _HALF_SPAN, low, low - _SPAN).to(torch.int32)


def _signed(word: int) -> int:
    return word if word < _HALF_SPAN else word - _SPAN
