"""Log-probabilities on their way to the host, for the lanes that asked for them."""

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.messages import TokenLogprobs
from lockstep.worker.logprobs import LogprobTensors
from lockstep.worker.sampling_state import LaneSampling

Wanted = list[tuple[int, int]]


def lanes_with_logprobs(sampling: LaneSampling, num_lanes: int) -> Wanted:
    """(lane, alternatives asked for) of the lanes that want log-probabilities now."""
    asked = ((lane, sampling.mirror(lane).num_logprobs) for lane in range(num_lanes))
    return [(lane, number) for lane, number in asked if number is not None]


class HostLogprobs:
    """A copy that has begun; read it once the event of the step's result row has passed."""

    def __init__(self, tensors: LogprobTensors, wanted: Wanted) -> None:
        self._wanted = wanted
        self._host = LogprobTensors(*(_to_host(tensor) for tensor in tensors))

    def read(self, counts: np.ndarray, token_ids: np.ndarray) -> list[tuple[int, TokenLogprobs]]:
        """Wire form for the lanes that got a token."""
        return [
            (lane, self._host.of_lane(lane, int(token_ids[lane]), number))
            for lane, number in self._wanted
            if counts[lane]
        ]


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
