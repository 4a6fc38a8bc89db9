"""Where the weights of a module live."""

from dataclasses import dataclass

import torch
from torch import nn

from lockstep.comm.collectives import Communicator


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks a module is split over, and the device and type of its parameters."""

    tp: Communicator
    device: torch.device
    dtype: torch.dtype

    def parameter(self, *shape: int) -> nn.Parameter:
        """Zeros: what a checkpoint does not fill is padding."""
        weight = torch.zeros(shape, device=self.device, dtype=self.dtype)
        return nn.Parameter(weight, requires_grad=False)
