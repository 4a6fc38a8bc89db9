"""How fast a device reads its memory: no step can read its weights and its KV cache faster."""

from collections.abc import Callable
from functools import partial

import msgspec
import torch
from torch import Tensor

from lockstep.worker.stopwatch import least_seconds

_CUDA_BYTES = 8 << 30
_CPU_BYTES = 256 << 20
_FREE_SHARE = 0.5
# A buffer that fits into caches would measure these.
_L2_TIMES = 16
_PROGRAMS_PER_SM = (1, 2, 4, 8, 16, 32)
_READS_PER_TRIAL = 4

Read = Callable[[], object]


class Ceiling(msgspec.Struct, frozen=True):
    """The best of several ways to read one buffer of ``num_bytes``.

    ``grid`` is how many programs the best one had; 0 where a library reads.
    """

    bytes_per_s: float
    num_bytes: int
    grid: int


def measure_ceiling(device: torch.device, num_bytes: int | None = None) -> Ceiling:
    """Read a buffer again and again; call it while nothing else uses the device.

    Args:
        num_bytes: of the buffer; None takes far more than the caches of the device hold.

    Raises:
        ValueError: the device has no room for a buffer beyond its caches.
    """
    buffer = _buffer(num_bytes or _default_bytes(device), device)
    readers = _cuda_readers(buffer) if device.type == "cuda" else {0: buffer.view(torch.int64).sum}
    seconds = {
        grid: least_seconds(device, read, _READS_PER_TRIAL) for grid, read in readers.items()
    }
    best = min(seconds, key=lambda grid: seconds[grid])
    return Ceiling(buffer.nbytes / seconds[best], buffer.nbytes, best)


def _default_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    num_bytes = min(_CUDA_BYTES, int(free * _FREE_SHARE))
    least = _L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size
    if num_bytes < least:
        raise ValueError(
            f"{device} has {free >> 20} MiB free: half of it must be at least {least >> 20} MiB, "
            f"{_L2_TIMES} times its L2 cache, to measure how fast memory is read"
        )
    return num_bytes


def _buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Random int32 of about so many bytes, whole for every reader."""
    whole = 1 << 16
    count = max(1, num_bytes // whole) * (whole // 4)
    return torch.empty(count, dtype=torch.int32, device=device).random_()


def _cuda_readers(buffer: Tensor) -> dict[int, Read]:
    """By the number of programs: a few a multiprocessor, up to one for each block."""
    from lockstep.worker.kernels.read import num_blocks, read

    num_sms = torch.cuda.get_device_properties(buffer.device).multi_processor_count
    grids = [each * num_sms for each in _PROGRAMS_PER_SM]
    grids = [grid for grid in grids if grid < num_blocks(buffer)] + [num_blocks(buffer)]
    return {grid: partial(read, buffer, buffer.new_empty(grid)) for grid in grids}
