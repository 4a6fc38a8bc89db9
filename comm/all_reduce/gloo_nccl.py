"""All-reduce by the library of the group: gloo on the host, NCCL on CUDA."""

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

from lockstep.comm.all_reduce.base import AllReduce
from lockstep.comm.groups import Group


class GlooAllReduce:
    """Gloo. With more than two ranks, gathers and sums in rank order.

    Gloo's own order depends on where an element lies in the buffer; two summands have only one.
    """

    name = "gloo"
    buffer = ""

    def __init__(self, group: Group) -> None:
        self._group = group

    def supports(self, x: Tensor) -> bool:
        return x.device.type == "cpu"

    def __call__(self, x: Tensor) -> Tensor:
        host = self._group.host_group
        if self._group.size == 2:
            host.allreduce([x]).wait()
            return x
        parts = x.new_empty((self._group.size, x.numel()))
        host._allgather_base(parts.view(-1), x.view(-1), AllgatherOptions()).wait()
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total.view_as(x)


class NcclAllReduce:
    """NCCL, on the current stream, so that a graph under capture records it."""

    name = "nccl"
    buffer = ""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._options = AllreduceOptions()
        self._options.asyncOp = False

    def supports(self, x: Tensor) -> bool:
        return x.device.type == "cuda" and x.dtype is not torch.bool

    def __call__(self, x: Tensor) -> Tensor:
        work = self._group.device_group.allreduce([x], self._options)
        if work is not None:
            work.wait()
        return x


def library_all_reduce(group: Group) -> AllReduce:
    """The one that serves every tensor of the group's device."""
    return NcclAllReduce(group) if group.device.type == "cuda" else GlooAllReduce(group)
