"""Ranks described by environment variables: torchrun's and Slurm's, made into ``RankSpec``s."""

import re
from collections.abc import Mapping

import msgspec

from lockstep.launcher.errors import ConfigError
from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.mesh import coordinates
from lockstep.parallel.rank_spec import RankSpec

# What a rank of another launcher sees; no engine started through Ray may read any of these.
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_STEP_NODELIST",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK",
    "PMI_SIZE",
)  # fmt: skip
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
# Of the step if there is one; the allocation may be larger.
_SLURM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
_SLURM_FIRST_PORT, _SLURM_NUM_PORTS = 20000, 10000


def foreign_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of another launcher that stand in ``env``."""
    return {name: env[name] for name in RANK_VARIABLES if name in env}


class Seat(msgspec.Struct, frozen=True):
    """What torchrun tells a process, before anything is known about the model."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int


def read_seat(env: Mapping[str, str]) -> Seat:
    """This process's seat, from torchrun's variables or, if those are absent, from Slurm's.

    Raises:
        ConfigError: names every missing variable, or the bad one with its value and limit.
    """
    if "RANK" not in env and "SLURM_PROCID" in env:
        env = torchrun_env_from_slurm(env)
    _require(env, _TORCHRUN, "start this with torchrun, or set them")
    world_size = _integer(env, "WORLD_SIZE", 1, 2**31)
    local_world_size = _optional(env, "LOCAL_WORLD_SIZE", 1, world_size + 1) or world_size
    rank = _integer(env, "RANK", 0, world_size)
    node_rank = _optional(env, "GROUP_RANK", 0, world_size)
    return Seat(
        rank=rank,
        local_rank=_integer(env, "LOCAL_RANK", 0, local_world_size),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        master_addr=env["MASTER_ADDR"],
        master_port=_integer(env, "MASTER_PORT", 1, 65536),
    )


def spec_of_seat(seat: Seat, parallel: ParallelConfig, *, device: str) -> RankSpec:
    """The rank that sits there.

    Raises:
        ConfigError: there are not as many seats as ranks, or a replica would be on two hosts.
    """
    if seat.world_size != parallel.world_size:
        raise ConfigError(
            f"WORLD_SIZE is {seat.world_size}, but tensor_parallel_size {parallel.tp_size} x "
            f"data_parallel_size {parallel.dp_size} needs {parallel.world_size} ranks"
        )
    if seat.local_world_size % parallel.tp_size:
        raise ConfigError(
            f"the ranks of a replica must be on one host, but LOCAL_WORLD_SIZE "
            f"{seat.local_world_size} is no multiple of tensor_parallel_size {parallel.tp_size}"
        )
    dp_rank, tp_rank = coordinates(seat.rank, parallel)
    return RankSpec(
        global_rank=seat.rank,
        world_size=seat.world_size,
        dp_rank=dp_rank,
        tp_rank=tp_rank,
        node_rank=seat.node_rank,
        local_rank=seat.local_rank,
        local_world_size=seat.local_world_size,
        device="cpu" if device == "cpu" else f"cuda:{seat.local_rank}",
        master_addr=seat.master_addr,
        master_port=seat.master_port,
    )


def torchrun_env_from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """The same place in torchrun's variables.

    MASTER_ADDR is the first host of the node list and MASTER_PORT follows from the job and step
    ids, unless they are set.
    """
    _require(env, _SLURM, "start this with srun")
    _check_order(env)
    port = _SLURM_FIRST_PORT + _step_number(env) % _SLURM_NUM_PORTS
    return {
        "RANK": env["SLURM_PROCID"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_WORLD_SIZE": str(_tasks_per_node(env)),
        "GROUP_RANK": env.get("SLURM_NODEID") or "0",
        "MASTER_ADDR": env.get("MASTER_ADDR") or _first_host(env),
        "MASTER_PORT": env.get("MASTER_PORT") or str(port),
    }


def _tasks_per_node(env: Mapping[str, str]) -> int:
    """The same on all nodes, or ranks would not know who sits where."""
    num_tasks = _integer(env, "SLURM_NTASKS", 1, 2**31)
    name = next((name for name in _SLURM_NODES if env.get(name)), None)
    num_nodes = _integer(env, name, 1, num_tasks + 1) if name else 1
    if num_tasks % num_nodes:
        raise ConfigError(
            f"every node must have as many tasks, but SLURM_NTASKS is {num_tasks} on "
            f"{num_nodes} nodes"
        )
    return num_tasks // num_nodes


def _check_order(env: Mapping[str, str]) -> None:
    """A replica's ranks follow each other, and must be on one host."""
    rank, local_rank = (_integer(env, name, 0, 2**31) for name in _SLURM[:2])
    if rank % _tasks_per_node(env) != local_rank:
        raise ConfigError(
            f"tasks must be numbered host by host (srun --distribution=block), but SLURM_PROCID "
            f"{rank} of {_tasks_per_node(env)} tasks a node has SLURM_LOCALID {local_rank}"
        )


def _step_number(env: Mapping[str, str]) -> int:
    job, step = (int(env.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return job * 31 + step


def _first_host(env: Mapping[str, str]) -> str:
    """First name of a list such as ``gpu[07-09,12],login1``."""
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", hosts)
    if match is None:
        raise ConfigError(f"SLURM_JOB_NODELIST must name a host first, got {hosts!r}")
    return match[1] + (match[2] or "")


def _require(env: Mapping[str, str], names: tuple[str, ...], hint: str) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        raise ConfigError(f"not in the environment: {', '.join(missing)}; {hint}")


def _integer(env: Mapping[str, str], name: str, low: int, high: int) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = low - 1
    if not low <= value < high:
        raise ConfigError(f"{name} must be an integer in [{low}, {high}), got {env[name]!r}")
    return value


def _optional(env: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    return _integer(env, name, low, high) if env.get(name) else None
