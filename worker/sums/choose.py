"""Gives the ranks of a replica the all-reduces they will use, before graphs are listed."""

import logging

import torch

from lockstep.comm.all_reduce.agreed import agreed, attempted
from lockstep.comm.all_reduce.base import FusedAllReduce
from lockstep.comm.all_reduce.fastest import fastest, slowest_of
from lockstep.comm.all_reduce.table import FUSED, Choice, fused_bytes, parse_table
from lockstep.comm.errors import CommError
from lockstep.comm.messages import SumTimes
from lockstep.parallel.placement import Placement
from lockstep.parallel.topology import Topology
from lockstep.worker.assembly import torch_dtype
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.cuda import CudaBackend
from lockstep.worker.layers import RMSNorm
from lockstep.worker.sums.fused import create_fused
from lockstep.worker.sums.times import Race, row_counts_up_to

logger = logging.getLogger(__name__)

_AUTO = "auto"


def choose_sums(config: WorkerConfig, topology: Topology) -> list[SumTimes]:
    """Set the table of ``topology.tp``; returns the times that it was chosen by, if any were taken.

    With "auto" the fastest serve, by time; a table that names the fused all-reduce is completed by
    it; another one stays. All ranks of ``topology.lockstep`` call this once they are connected.

    Raises:
        CommError: the table names the fused all-reduce, and it cannot work here; says why.
    """
    limit = 0 if config.all_reduce == _AUTO else fused_bytes(parse_table(config.all_reduce))
    on_cuda = topology.spec.device.startswith("cuda")
    if topology.tp.size == 1 or not on_cuda or (config.all_reduce != _AUTO and not limit):
        return []
    if agreed(topology.lockstep, _alone(topology)) is not None:
        return []
    norm = _norm(config, topology)
    fused = _fused(config, topology, norm)
    if config.all_reduce == _AUTO:
        return _fastest(config, topology, norm, fused)
    table = topology.tp.table
    topology.tp.table = table.rechosen([Choice(FUSED, limit), *table.choices], fused)
    return []


def _alone(topology: Topology) -> str | None:
    return None if len(topology.tp.table.algorithms) > 1 else "there is nothing to choose from"


def _norm(config: WorkerConfig, topology: Topology) -> RMSNorm:
    """Of the size and type that the model's norms have."""
    device = torch.device(topology.spec.device)
    place = Placement(topology.tp, device, torch_dtype(config))
    norm = RMSNorm(config.model.hidden_size, config.model.rms_norm_eps, place)
    norm.weight.fill_(1.0)
    return norm


def _fused(config: WorkerConfig, topology: Topology, norm: RMSNorm) -> FusedAllReduce | None:
    found = create_fused(topology.tp, norm)
    reason = agreed(topology.lockstep, found if isinstance(found, str) else None)
    if reason is None and not isinstance(found, str):
        return found
    if config.all_reduce != _AUTO:
        raise CommError(f"all_reduce {config.all_reduce!r} cannot work here: {reason}")
    logger.warning("sums and the norms behind them stay two operations: %s", reason)
    return None


def _fastest(
    config: WorkerConfig, topology: Topology, norm: RMSNorm, fused: FusedAllReduce | None
) -> list[SumTimes]:
    row_counts = row_counts_up_to(config.schedule.max_num_batched_tokens, norm.weight.nbytes)
    race = Race(topology, norm, fused, row_counts, CudaBackend(norm.weight.device))
    times = run_race(race, topology)
    table = topology.tp.table
    if isinstance(times, str):
        logger.warning("all-reduces stay %s, since they cannot be timed: %s", table.text, times)
        return []
    library = next(iter(table.algorithms))
    topology.tp.table = table.rechosen(fastest(times, library), fused)
    logger.info("all-reduce by size, as measured: %s", topology.tp.table.text)
    return times


def run_race(race: Race, topology: Topology) -> list[SumTimes] | str:
    """The slowest rank's times, or why there are none; the same on all ranks."""
    _, reason = attempted(topology.lockstep, race.capture)
    own = race.times() if reason is None else []
    race.release()
    if reason is not None:
        return reason
    ranks = topology.lockstep.all_gather_object(own)
    return slowest_of([[SumTimes(*row) for row in rows] for rows in ranks])
