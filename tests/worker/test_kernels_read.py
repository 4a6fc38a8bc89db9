"""The kernel that measures how fast memory is read reads all of it."""

from functools import reduce
from operator import xor

import pytest
import torch
from kernel_device import kernel_device, kernel_marks

DEVICE = kernel_device()

from lockstep.worker.kernels.read import num_blocks, read  # noqa: E402

pytestmark = kernel_marks()


@pytest.mark.parametrize("programs", [1, 3, 8])
def test_every_element_is_read_once(programs: int) -> None:
    generator = torch.Generator().manual_seed(programs)
    buffer = torch.randint(-(1 << 31), 1 << 31, (8 * 4096,), generator=generator).int()
    assert num_blocks(buffer) == 8
    found = torch.empty(programs, dtype=torch.int32, device=DEVICE)
    read(buffer.to(DEVICE), found)
    assert reduce(xor, found.tolist()) == reduce(xor, buffer.tolist())
