"""Starts a worker in this process and profiles its decode steps, without graphs and with them."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.engine import Progress
from lockstep.launcher.profile.options import ProfileOptions
from lockstep.launcher.profile.report import (
    BatchProfile,
    Machine,
    ProfileReport,
    step_profile,
)
from lockstep.launcher.profile.sizing import decode_graphs_only, sized
from lockstep.launcher.resolve import resolve
from lockstep.parallel.rank_spec import RankSpec
from lockstep.parallel.topology import Topology
from lockstep.worker.bare_steps import BareSteps
from lockstep.worker.ceiling import measure_ceiling
from lockstep.worker.config import ModelConfig, WorkerConfig
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker
from lockstep.worker.profiling.decode import DecodeProfiler, Effort
from lockstep.worker.profiling.launches import time_launch


def measure(options: ProfileOptions, config: LaunchConfig, progress: Progress) -> ProfileReport:
    """Profile every batch that ``options`` name.

    Raises:
        ConfigError: the model cannot be found or served.
        ValueError: settings that cannot work; names field, value and limit.
    """
    effort = Effort(options.steps, options.repeats)
    resolved = resolve(decode_graphs_only(config), progress=progress)
    device = torch.device("cuda:0" if resolved.device == "cuda" else "cpu")
    worker_config = sized(resolved.worker, options, effort)
    model = msgspec.structs.replace(worker_config.model, dtype=worker_config.dtype)
    # Before the worker takes the memory that it is measured with.
    machine = _machine(device)
    batches = list[BatchProfile]()
    with _started(worker_config, device, progress) as worker:
        profiler = DecodeProfiler(BareSteps(worker), device, effort)
        for done, num_reqs in enumerate(options.batch):
            progress("profile", done, len(options.batch))
            batches.append(_batch(profiler, num_reqs, options, model, machine))
    return ProfileReport(config.model, model.dtype, machine, batches)


def _machine(device: torch.device) -> Machine:
    on_gpu = device.type == "cuda"
    ceiling = measure_ceiling(device)
    torch.cuda.empty_cache()
    return Machine(
        name=torch.cuda.get_device_name(device) if on_gpu else "CPU",
        is_gpu=on_gpu,
        ceiling_bytes_per_s=ceiling.bytes_per_s,
        launch_us=time_launch(device),
    )


@contextmanager
def _started(config: WorkerConfig, device: torch.device, progress: Progress) -> Iterator[Worker]:
    spec = RankSpec(global_rank=0, world_size=1, dp_rank=0, tp_rank=0, device=str(device))
    worker = Worker(config, spec, Topology.single(str(device)))
    worker.start(progress)
    try:
        yield worker
    finally:
        worker.close()


def _batch(
    profiler: DecodeProfiler,
    num_reqs: int,
    options: ProfileOptions,
    model: ModelConfig,
    machine: Machine,
) -> BatchProfile:
    eager, graphs = (
        profiler.profile(num_reqs, options.input_len, mode)
        for mode in (RunMode.EAGER, RunMode.FULL)
    )
    served = graphs.run_mode != RunMode.EAGER.name
    return BatchProfile(
        step_profile(eager, model, machine),
        step_profile(graphs, model, machine) if served else None,
    )
