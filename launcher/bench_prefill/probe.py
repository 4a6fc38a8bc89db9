"""How fast a rank's device multiplies matrices of the model's shapes."""

import msgspec

from lockstep.launcher.bench_engine.own_process import first_device, run_apart
from lockstep.launcher.config import Device
from lockstep.worker.config import WorkerConfig
from lockstep.worker.gemm_rate import GemmRate
from lockstep.worker.models.footprint import Footprint


class Probe(msgspec.Struct, frozen=True):
    """The name of the first device, and its rate."""

    name: str
    gemm: GemmRate


def probe(device: Device, config: WorkerConfig) -> Probe:
    """Products of a step's tokens with the weights of one layer of one rank.

    Raises:
        LaunchError: the device cannot be used.
    """
    return run_apart(device, _probe, device, config)


def _probe(device: Device, config: WorkerConfig) -> Probe:
    from lockstep.worker.assembly import torch_dtype
    from lockstep.worker.gemm_rate import measure_gemm_rate

    found, name = first_device(device)
    sizes = Footprint(config.model, config.parallel.tp_size).layer_products
    num_rows = config.schedule.max_num_batched_tokens
    return Probe(name, measure_gemm_rate(found, torch_dtype(config), sizes, num_rows))
