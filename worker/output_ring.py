"""Where steps leave their results on the device, and how a host reads one without stopping it."""

import torch
from torch import Tensor

COUNT, TOKEN, STATUS = range(3)

OK = 0
NOT_FINITE = 1  # the lane's logits held NaN or infinity: its request ends with an error
SLOT_FAULT = 2  # the lane wrote to the padding block: the worker stops
OUT_OF_STEP = 4  # a replica of the lockstep group is at another step: the worker stops
PEER_SHIFT = 8  # with OUT_OF_STEP, the place of that replica in the group, above these bits


class OutputRing:
    """The last ``depth`` rows of (count, token, status), indexed by a counter on the device.

    The counter is device state because a captured tail must find its row by itself; the host
    knows the same number by counting launches.
    """

    def __init__(self, depth: int, max_lanes: int, device: torch.device) -> None:
        self.depth = depth
        self.rows = torch.zeros(depth, 3, max_lanes, dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)

    def write(self, counts: Tensor, token_ids: Tensor, status: Tensor) -> None:
        """Store one step's row, each [num_lanes], and advance the counter."""
        row = torch.stack([counts.int(), token_ids.int(), status.int()])
        rows = self.rows[:, :, : row.shape[1]]
        rows.index_copy_(0, self.counter % self.depth, row.unsqueeze(0))
        self.next_row()

    def next_row(self) -> None:
        self.counter.add_(1)

    def row(self, step: int) -> Tensor:
        """[3, max_lanes] int32 on the device: the row of the ``step``-th step since the start."""
        return self.rows[step % self.depth]

    def statics(self) -> dict[str, Tensor]:
        return {"output_ring": self.rows, "output_counter": self.counter}
