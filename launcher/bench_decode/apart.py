"""What the benchmark itself does on a device, in a process of its own: ranks count its memory."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

import msgspec

from lockstep.launcher.config import Device
from lockstep.launcher.errors import LaunchError
from lockstep.worker.accuracy import Accuracy
from lockstep.worker.ceiling import Ceiling
from lockstep.worker.config import WorkerConfig
from lockstep.worker.judge import Answer

P = ParamSpec("P")
T = TypeVar("T")


class Probe(msgspec.Struct, frozen=True):
    """The name of the first device, and how fast it reads."""

    name: str
    ceiling: Ceiling


def probe(device: Device) -> Probe:
    """Raises LaunchError if the device cannot be used."""
    return _apart(device, _probe, device)


def judge(device: Device, config: WorkerConfig, answers: Sequence[Answer]) -> list[Accuracy]:
    """See ``worker.judge.judge``. Raises LaunchError if the device cannot be used."""
    return _apart(device, _judge, config, device, answers)


def _apart(device: Device, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """On a CPU nobody counts memory, and this process does as well."""
    if device == "cpu":
        return fn(*args, **kwargs)
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(fn, *args, **kwargs).result()
    except (BrokenProcessPool, RuntimeError, ValueError) as error:
        raise LaunchError(f"the benchmark's own process failed: {error}") from error


def _probe(device: Device) -> Probe:
    import torch

    from lockstep.worker.ceiling import measure_ceiling

    found = torch.device("cpu" if device == "cpu" else "cuda:0")
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name(found)
    return Probe(name, measure_ceiling(found))


def _judge(config: WorkerConfig, device: Device, answers: Sequence[Answer]) -> list[Accuracy]:
    from lockstep.worker.judge import judge

    return judge(config, device, answers)
