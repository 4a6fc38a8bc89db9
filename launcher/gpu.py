"""What a driver process may ask about GPUs without opening a context on one."""

import ctypes
import os

from lockstep.launcher.errors import ConfigError

Capability = tuple[int, int]

# CUdevice_attribute numbers of the compute capability.
_MAJOR, _MINOR = 75, 76


def gpu_capability() -> Capability | None:
    """Compute capability of the first GPU that torch can use here; None if there is none.

    torch would open a context to tell it, which costs memory on a GPU that belongs to a rank, so
    the driver library is asked.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    major, minor, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    )
    return None if failed else (major.value, minor.value)


def check_seen(index: int) -> None:
    """Let ``cuda:INDEX`` pass if this process sees it.

    Raises:
        ValueError: it does not; says how many it sees.
    """
    import torch

    count = torch.cuda.device_count()
    if index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ValueError(
            f"cuda:{index} is not there: this process sees {count} GPU(s), "
            f"CUDA_VISIBLE_DEVICES={visible!r}"
        )


def check_gpus(num_gpus: int) -> None:
    """Before a command uses so many GPUs of its own host; Ray's ranks may be elsewhere.

    Raises:
        ConfigError: they are not all there; names the flag.
    """
    try:
        check_seen(num_gpus - 1)
    except ValueError as error:
        raise ConfigError(f"--device=cuda: {error}") from None
