"""What ``bench decode`` itself does on a device: it measures the ceiling, and judges answers."""

from collections.abc import Sequence

import msgspec

from lockstep.launcher.bench_engine.own_process import first_device, run_apart
from lockstep.launcher.config import Device
from lockstep.worker.accuracy import Accuracy
from lockstep.worker.ceiling import Ceiling
from lockstep.worker.config import WorkerConfig
from lockstep.worker.judge import Answer


class Probe(msgspec.Struct, frozen=True):
    """The name of the first device, and how fast it reads."""

    name: str
    ceiling: Ceiling


def probe(device: Device) -> Probe:
    """Raises LaunchError if the device cannot be used."""
    return run_apart(device, _probe, device)


def judge(device: Device, config: WorkerConfig, answers: Sequence[Answer]) -> list[Accuracy]:
    """See ``worker.judge.judge``. Raises LaunchError if the device cannot be used."""
    return run_apart(device, _judge, config, device, answers)


def _probe(device: Device) -> Probe:
    from lockstep.worker.ceiling import measure_ceiling

    found, name = first_device(device)
    return Probe(name, measure_ceiling(found))


def _judge(config: WorkerConfig, device: Device, answers: Sequence[Answer]) -> list[Accuracy]:
    from lockstep.worker.judge import judge

    return judge(config, device, answers)
