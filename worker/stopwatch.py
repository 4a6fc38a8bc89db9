"""How long one call keeps a device busy, at best."""

import time
from collections.abc import Callable

import torch

_TRIALS = 5


def least_seconds(device: torch.device, call: Callable[[], object], calls_per_trial: int) -> float:
    """Of one call, over trials of several in a row; one goes before all of them."""
    call()
    timed = _cuda_seconds if device.type == "cuda" else _host_seconds
    return min(timed(call, calls_per_trial) for _ in range(_TRIALS)) / calls_per_trial


def _cuda_seconds(call: Callable[[], object], num_calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _host_seconds(call: Callable[[], object], num_calls: int) -> float:
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    return time.perf_counter() - began
