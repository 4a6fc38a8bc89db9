"""From where Ray put the ranks to their ``RankSpec``s. Pure; nothing here imports ray or torch."""

import msgspec

from lockstep.launcher.errors import PlacementError
from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.mesh import coordinates
from lockstep.parallel.rank_spec import RankSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
# All ranks are on one host, so nothing outside it needs to reach their rendezvous.
STORE_HOST = "127.0.0.1"
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


# Producer: a WorkerActor, before it starts. Consumer: the driver.
class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where Ray put one rank. ``visible`` is that process's CUDA_VISIBLE_DEVICES, None if unset.

    ``boot_id`` tells whether two processes share a kernel, whatever their hosts are called.
    """

    node_id: str
    host: str
    pid: int
    boot_id: str
    gpu_ids: tuple[str, ...] = ()
    visible: str | None = None


def device_index(gpu_id: str, visible: str | None) -> int:
    """The index that torch gives the GPU which Ray calls ``gpu_id`` (a number or a UUID).

    With a list of visible devices torch counts along that list; without one, along the machine.

    Raises:
        PlacementError: the id is not in the list, or is no number though there is no list.
    """
    if visible is None:
        if gpu_id.isdecimal():
            return int(gpu_id)
        raise PlacementError(f"Ray assigned GPU {gpu_id!r}, which without {VISIBLE} has no index")
    listed = [entry.strip() for entry in visible.split(",")]
    for index, entry in enumerate(listed):
        if entry and (entry == gpu_id or _abbreviates(entry, gpu_id)):
            return index
    raise PlacementError(f"Ray assigned GPU {gpu_id!r}, which is not in {VISIBLE}={visible!r}")


def _abbreviates(entry: str, gpu_id: str) -> bool:
    # CUDA takes any unique beginning of a UUID.
    return not entry.isdecimal() and gpu_id.startswith(entry)


def device_of(place: Place, device: str) -> str:
    """ "cpu", or "cuda:<index>" of the one GPU of this place.

    Raises:
        PlacementError: not exactly one GPU.
    """
    if device == "cpu":
        return "cpu"
    if len(place.gpu_ids) != 1:
        raise PlacementError(
            f"a rank needs exactly 1 GPU, Ray gave process {place.pid} on {place.host} "
            f"{len(place.gpu_ids)}: {list(place.gpu_ids)}"
        )
    return f"cuda:{device_index(place.gpu_ids[0], place.visible)}"


def specs_from_places(
    places: list[Place], parallel: ParallelConfig, *, device: str, port: int, epoch: int = 0
) -> list[RankSpec]:
    """One ``RankSpec`` a place, in order of global rank; rank 0 listens on ``port``.

    Raises:
        PlacementError: ranks on several hosts, or two ranks on one GPU.
    """
    _check_one_host(places)
    devices = [device_of(place, device) for place in places]
    _check_distinct(devices)
    return [
        RankSpec(
            global_rank=rank,
            world_size=parallel.world_size,
            dp_rank=coordinates(rank, parallel)[0],
            tp_rank=coordinates(rank, parallel)[1],
            local_rank=rank,
            device=devices[rank],
            master_addr=STORE_HOST,
            master_port=port,
            epoch=epoch,
        )
        for rank in range(parallel.world_size)
    ]


def _check_one_host(places: list[Place]) -> None:
    first = places[0]
    for rank, place in enumerate(places):
        if place.boot_id != first.boot_id or place.node_id != first.node_id:
            raise PlacementError(
                f"all ranks must be on one host, but rank 0 is on {first.host} "
                f"(node {first.node_id[:8]}) and rank {rank} on {place.host} "
                f"(node {place.node_id[:8]})"
            )


def _check_distinct(devices: list[str]) -> None:
    owner: dict[str, int] = {}
    for rank, device in enumerate(devices):
        if device != "cpu" and device in owner:
            raise PlacementError(f"ranks {owner[device]} and {rank} were both given {device}")
        owner[device] = rank
