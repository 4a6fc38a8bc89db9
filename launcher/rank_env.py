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
_SLURM_FIRST_PORT, _SLURM_NUM_PORTS = 20000, 10000


def foreign_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of another launcher that stand in ``env``."""
    return {name: env[name] for name in RANK_VARIABLES if name in env}


class Seat(msgspec.Struct, frozen=True):
    """What torchrun tells a process, before anything is known about the model."""

    rank: int
    local_rank: int
    world_size: int
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
    _check_one_host(env, world_size)
    return Seat(
        rank=_integer(env, "RANK", 0, world_size),
        local_rank=_integer(env, "LOCAL_RANK", 0, world_size),
        world_size=world_size,
        master_addr=env["MASTER_ADDR"],
        master_port=_integer(env, "MASTER_PORT", 1, 65536),
    )


def spec_of_seat(seat: Seat, parallel: ParallelConfig, *, device: str) -> RankSpec:
    """The rank that sits there.

    Raises:
        ConfigError: there are not as many seats as ranks.
    """
    if seat.world_size != parallel.world_size:
        raise ConfigError(
            f"WORLD_SIZE is {seat.world_size}, but tensor_parallel_size {parallel.tp_size} x "
            f"data_parallel_size {parallel.dp_size} needs {parallel.world_size} ranks"
        )
    dp_rank, tp_rank = coordinates(seat.rank, parallel)
    return RankSpec(
        global_rank=seat.rank,
        world_size=seat.world_size,
        dp_rank=dp_rank,
        tp_rank=tp_rank,
        local_rank=seat.local_rank,
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
    port = _SLURM_FIRST_PORT + _step_number(env) % _SLURM_NUM_PORTS
    return {
        "RANK": env["SLURM_PROCID"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_WORLD_SIZE": str(_tasks_per_node(env)),
        "MASTER_ADDR": env.get("MASTER_ADDR") or _first_host(env),
        "MASTER_PORT": env.get("MASTER_PORT") or str(port),
    }


def _tasks_per_node(env: Mapping[str, str]) -> int:
    nodes = {name: env.get(name) or "1" for name in ("SLURM_NNODES", "SLURM_NTASKS")}
    return _integer(nodes, "SLURM_NTASKS", 1, 2**31) // _integer(nodes, "SLURM_NNODES", 1, 2**31)


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


def _check_one_host(env: Mapping[str, str], world_size: int) -> None:
    local = _integer(env, "LOCAL_WORLD_SIZE", 1, 2**31) if env.get("LOCAL_WORLD_SIZE") else None
    if local is not None and local != world_size:
        raise ConfigError(
            f"all ranks must be on one host, but LOCAL_WORLD_SIZE is {local} of "
            f"WORLD_SIZE {world_size}"
        )


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
