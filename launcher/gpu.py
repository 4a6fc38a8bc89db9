"""What a driver process may ask about GPUs without opening a context on one."""

import ctypes

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
