"""GPUs as data: memory and memory bandwidth by their makers' data sheets."""

from typing import NamedTuple

from lockstep.launcher.strict import suggestion


class GpuModel(NamedTuple):
    """``memory_gb`` in 10^9 bytes, ``bandwidth_tb_s`` in 10^12 bytes a second."""

    name: str
    memory_gb: int
    bandwidth_tb_s: float


GPUS = (
    GpuModel("T4", 16, 0.320),
    GpuModel("V100", 32, 0.900),
    GpuModel("A10", 24, 0.600),
    GpuModel("A30", 24, 0.933),
    GpuModel("A40", 48, 0.696),
    GpuModel("A100-40GB", 40, 1.555),
    GpuModel("A100-80GB", 80, 2.039),
    GpuModel("L4", 24, 0.300),
    GpuModel("L40S", 48, 0.864),
    GpuModel("RTX-4090", 24, 1.008),
    GpuModel("RTX-5090", 32, 1.792),
    GpuModel("H100-PCIe", 80, 2.0),
    GpuModel("H100", 80, 3.35),
    GpuModel("H200", 141, 4.8),
    GpuModel("B200", 180, 8.0),
)


def find_gpu(name: str) -> GpuModel:
    """The GPU of that name, whatever its case.

    Raises:
        ValueError: it is not in the table.
    """
    for gpu in GPUS:
        if gpu.name.lower() == name.lower():
            return gpu
    raise ValueError(f"gpu {name!r} is not known{suggestion(name, [gpu.name for gpu in GPUS])}")
