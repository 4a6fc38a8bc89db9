"""Masks in the logits of one rank, against masks spelled out."""

import pytest
import torch
from mask_oracle import masked, random_masks, some_logits

from lockstep.comm.messages import LaneMask
from lockstep.worker.masks import LaneMasks

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [31, 64, 97, 130])
@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_each_shard_takes_its_own_bits_wherever_it_begins(vocab_size: int, tp_size: int) -> None:
    vocab_local = -(-vocab_size // tp_size)
    for rank in range(tp_size):
        start = rank * vocab_local
        lane_masks = LaneMasks(6, vocab_start=start, vocab_size=vocab_size, device=CPU)
        for seed, lanes in enumerate([[4, 0, 2, 5], [1], [3, 4], [0, 1, 2, 3, 4, 5]]):
            masks, allowed = random_masks(lanes, vocab_size, seed)
            logits = some_logits(6, vocab_local, seed)
            logits[:, max(0, vocab_size - start) :] = float("-inf")
            expected = masked(logits, allowed, start)
            lane_masks.apply(logits, masks)
            torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)


def test_more_masks_than_lanes_are_refused() -> None:
    lane_masks = LaneMasks(1, vocab_start=0, vocab_size=40, device=CPU)
    with pytest.raises(ValueError, match="upload buffer 3"):
        lane_masks.apply(torch.zeros(2, 40), [LaneMask(lane, b"\xff" * 8) for lane in range(2)])
