"""The kernel of masks against masks spelled out."""

import pytest
import torch
from kernel_device import kernel_device, kernel_marks
from mask_oracle import masked, random_masks, some_logits

DEVICE = kernel_device()

from lockstep.worker.kernels.mask import forbid  # noqa: E402

pytestmark = kernel_marks()


def packed(masks, *, device):
    words = [torch.frombuffer(bytearray(mask.words), dtype=torch.int32) for mask in masks]
    lanes = torch.tensor([mask.lane for mask in masks], dtype=torch.int32)
    return lanes.to(device), torch.stack(words).to(device)


@pytest.mark.parametrize(
    ("vocab_size", "start", "vocab_local"),
    [(97, 0, 97), (97, 49, 49), (5000, 0, 5000), (5000, 1667, 1667), (5000, 3334, 1667)],
)
def test_the_kernel_forbids_what_has_no_bit(vocab_size: int, start: int, vocab_local: int) -> None:
    for seed, lanes in enumerate([[4, 0, 2, 5], [1]]):
        masks, allowed = random_masks(lanes, vocab_size, seed)
        logits = some_logits(6, vocab_local, seed)
        expected = masked(logits, allowed, start)
        found = logits.to(DEVICE)
        forbid(found, *packed(masks, device=DEVICE), start)
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
