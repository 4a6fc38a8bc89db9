"""Profiles decode steps, without graphs and with them, on a rank in this process."""

import msgspec
import torch

from lockstep.comm.errors import CommError
from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.engine import Progress
from lockstep.launcher.errors import StartError
from lockstep.launcher.gpu import check_gpus
from lockstep.launcher.profile.options import ProfileOptions
from lockstep.launcher.profile.ranks import RankTask, Recorded, run_ranks
from lockstep.launcher.profile.report import BatchProfile, Machine, ProfileReport, step_profile
from lockstep.launcher.profile.sizing import decode_graphs_only, sized
from lockstep.launcher.resolve import resolve
from lockstep.worker.ceiling import measure_ceiling
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.models.footprint import Footprint
from lockstep.worker.profiling.decode import Effort
from lockstep.worker.profiling.launches import time_launch
from lockstep.worker.profiling.record import ProfilerError


def measure(options: ProfileOptions, config: LaunchConfig, progress: Progress) -> ProfileReport:
    """Profile every batch that ``options`` name.

    Raises:
        ConfigError: the model cannot be found or served, or a GPU is not there.
        ValueError: settings that cannot work; names field, value and limit.
        StartError: a rank was lost, or the profiler does not see what runs.
    """
    effort = Effort(options.steps, options.repetitions)
    resolved = resolve(decode_graphs_only(config), progress=progress)
    if resolved.device != "cpu":
        check_gpus(resolved.world_size)
    worker = sized(resolved.worker, options, effort)
    task = RankTask(worker, resolved.device, options.batch, options.input_len, effort)
    # Before ranks take the memory that it is measured with.
    machine = _machine(torch.device(resolved.device))
    try:
        recorded = run_ranks(task, progress)
    except (CommError, ProfilerError) as error:
        raise StartError(str(error)) from error
    model = msgspec.structs.replace(worker.model, dtype=worker.dtype)
    footprint = Footprint(model, worker.parallel.tp_size)
    batches = [_batch(each, footprint, machine) for each in recorded]
    return ProfileReport(config.model, model.dtype, footprint.tp_size, machine, batches)


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


def _batch(recorded: Recorded, footprint: Footprint, machine: Machine) -> BatchProfile:
    eager, graphs = recorded
    served = graphs.run_mode != RunMode.EAGER.name
    return BatchProfile(
        step_profile(eager, footprint, machine),
        step_profile(graphs, footprint, machine) if served else None,
    )
