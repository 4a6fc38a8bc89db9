"""What handing one operation to the device costs the host, however little the operation does."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

# Fewer than a GPU's queue holds: a full one would be waited for.
_AT_ONCE = 400
_ROUNDS = 9


def time_launch(device: torch.device) -> float:
    """Microseconds of the host for each of many empty kernels launched back to back, a median.

    On a CPU, which launches nothing, those of calling an operation of torch on no elements.
    """
    launch = _empty_launch(device)
    return statistics.median(_round(device, launch) for _ in range(_ROUNDS))


def _empty_launch(device: torch.device) -> Callable[[], object]:
    if device.type == "cuda":
        return partial(torch.cuda._sleep, 0)  # a kernel of one thread that waits for no cycle
    return torch.empty(0).zero_


def _round(device: torch.device, launch: Callable[[], object]) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(_AT_ONCE):
        launch()
    microseconds = (time.perf_counter() - began) * 1e6 / _AT_ONCE
    _wait(device)
    return microseconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
