"""Masks over a vocabulary, and what they make of logits, spelled out."""

import torch
from torch import Tensor

from lockstep.comm.messages import LaneMask


def random_masks(
    lanes: list[int], vocab_size: int, seed: int
) -> tuple[list[LaneMask], dict[int, set[int]]]:
    """Masks, and by lane the ids that each allows. One lane may have nothing, another all."""
    generator = torch.Generator().manual_seed(seed)
    masks, allowed = [], {}
    for index, lane in enumerate(lanes):
        share = (0.0, 1.0, 0.3)[min(index, 2)]
        bits = torch.rand(vocab_size, generator=generator) < share
        allowed[lane] = set(bits.nonzero()[:, 0].tolist())
        word = sum(1 << token_id for token_id in allowed[lane])
        masks.append(LaneMask(lane, word.to_bytes(4 * -(-vocab_size // 32), "little")))
    return masks, allowed


def masked(logits: Tensor, allowed: dict[int, set[int]], start: int) -> Tensor:
    """A new tensor; NaN and +inf stay."""
    expected = logits.clone()
    for lane, ids in allowed.items():
        for column in range(logits.shape[1]):
            if start + column not in ids and expected[lane, column] < float("inf"):
                expected[lane, column] = float("-inf")
    return expected


def some_logits(num_lanes: int, vocab_local: int, seed: int) -> Tensor:
    """With a NaN, infinities of both kinds, and rows of more lanes than have masks."""
    logits = torch.randn(num_lanes, vocab_local, generator=torch.Generator().manual_seed(seed))
    logits[0, 0], logits[1, 1], logits[2, 2] = float("nan"), float("inf"), float("-inf")
    return logits
