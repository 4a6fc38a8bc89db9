"""One copy to the device for all the numbers of a plan."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.worker.events import DeviceEvent

Numbers = Sequence[int] | np.ndarray


class Uploader:
    """Packs lists of integers into a host buffer and slices its copy on the device.

    Args:
        capacity: numbers that one call may send.
        depth: calls that may be on their way before one waits.
        dtype: of the numbers, on both sides.

    On CUDA the host buffers are pinned and rotate; one is written again only after its copy is
    done. There is a single device buffer: copies and readers are on one stream, in order.
    """

    def __init__(
        self,
        capacity: int,
        depth: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.int64,
    ) -> None:
        self.capacity = capacity
        cuda = device.type == "cuda"
        self._hosts = [torch.empty(capacity, dtype=dtype, pin_memory=cuda) for _ in range(depth)]
        self._copied = [DeviceEvent(device) for _ in range(depth)]
        self._device = torch.empty(capacity, dtype=dtype, device=device)
        self._turn = 0

    def send(self, *lists: Numbers) -> list[Tensor]:
        """Views on the device, one a list, valid until the next call on this stream."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._hosts)
        self._copied[turn].wait()
        total = _pack(self._hosts[turn].numpy(), lists)
        self._device[:total].copy_(self._hosts[turn][:total], non_blocking=True)
        self._copied[turn].record()
        return list(torch.split(self._device[:total], [len(numbers) for numbers in lists]))


def _pack(host: np.ndarray, lists: Sequence[Numbers]) -> int:
    at = 0
    for numbers in lists:
        end = at + len(numbers)
        if end > len(host):
            raise ValueError(f"a plan holds {end} numbers or more, the upload buffer {len(host)}")
        host[at:end] = numbers
        at = end
    return at
