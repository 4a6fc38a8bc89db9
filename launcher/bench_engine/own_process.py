"""What a benchmark itself does on a device, in a process of its own: ranks count its memory."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from lockstep.launcher.config import Device
from lockstep.launcher.errors import LaunchError
from lockstep.launcher.gpu import check_gpus

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
T = TypeVar("T")


def run_apart(device: Device, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``fn`` there; on a CPU nobody counts memory, and this process does as well.

    Raises:
        ConfigError: the device is not there.
        LaunchError: it cannot be used.
    """
    if device == "cpu":
        return fn(*args, **kwargs)
    check_gpus(1)
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(fn, *args, **kwargs).result()
    except (BrokenProcessPool, RuntimeError, ValueError) as error:
        raise LaunchError(f"the benchmark's own process failed: {error}") from error


def first_device(device: Device) -> "tuple[torch.device, str]":
    """The one that benchmarks use themselves, and its name."""
    import torch

    if device == "cpu":
        return torch.device("cpu"), "cpu"
    return torch.device("cuda:0"), torch.cuda.get_device_name(0)
