"""How the actors are created: where, with what of the host, in which environment."""

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lockstep.launcher.actors import (
    SCHEDULER_GROUPS,
    WORKER_GROUPS,
    SchedulerActor,
    WorkerActor,
)
from lockstep.launcher.guard import MARK
from lockstep.launcher.placement import NOSET, VISIBLE
from lockstep.launcher.rank_host import RankWorker
from lockstep.launcher.reserve import Reservation
from lockstep.launcher.scheduler_host import MakeDriver
from lockstep.worker.config import WorkerConfig
from lockstep.worker.cores import usable_cores

# Settings of libraries that must be the same on all ranks travel with the engine.
_TRAVELS = ("NCCL_", "GLOO_", "TORCH_", "TRITON_", "HF_", "LOCKSTEP_", "PYTHONHASHSEED")


def create_worker(
    config: WorkerConfig,
    rank: int,
    reservation: Reservation,
    mark: str,
    worker_type: type[RankWorker] | None,
) -> Any:
    """The actor of one rank, on its bundle; Ray masks by the actor's own request, so it says it."""
    env = {
        NOSET: "1",
        "OMP_NUM_THREADS": str(threads_per_rank(os.environ, config.parallel.world_size)),
        # What torchrun sets, so that both launchers fail alike.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    on_cpu = reservation.resource == "CPU"
    return _create(
        WorkerActor,
        (config, worker_type),
        name=f"{reservation.owner}/rank-{rank}",
        bundle=reservation.place(rank),
        env=actor_environment(os.environ, mark) | env,
        concurrency_groups=WORKER_GROUPS,
        num_cpus=1 if on_cpu else 0,
        num_gpus=0 if on_cpu else 1,
    )


def create_scheduler(
    config: WorkerConfig, reservation: Reservation, mark: str, make: MakeDriver | None
) -> Any:
    """The scheduler's actor, on rank 0's host, taking nothing from it and seeing no GPU."""
    return _create(
        SchedulerActor,
        (config, make),
        name=f"{reservation.owner}/scheduler",
        bundle=reservation.place(0),
        env=actor_environment(os.environ, mark) | {VISIBLE: ""},
        concurrency_groups=SCHEDULER_GROUPS,
        num_cpus=0,
        num_gpus=0,
    )


def actor_environment(env: Mapping[str, str], mark: str) -> dict[str, str]:
    """What of the driver's environment an actor gets, wherever it runs, and the engine's mark."""
    travels = {name: value for name, value in env.items() if name.startswith(_TRAVELS)}
    return travels | {MARK: mark}


def threads_per_rank(env: Mapping[str, str], num_ranks: int) -> int:
    """The user's OMP_NUM_THREADS, else an equal share of the cores."""
    chosen = env.get("OMP_NUM_THREADS", "")
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    return max(1, usable_cores() // num_ranks)


def _create(
    actor_class: type,
    args: tuple[Any, ...],
    *,
    bundle: tuple[Any, int],
    env: dict[str, str],
    **options: Any,
) -> Any:
    group, index = bundle
    # A lone restarted rank cannot rejoin its groups: what dies stays dead.
    actor: Any = ray.remote(max_restarts=0, max_task_retries=0, **options)(actor_class)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return actor.options(scheduling_strategy=strategy, runtime_env={"env_vars": env}).remote(*args)
