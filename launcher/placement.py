"""From where Ray put the ranks to their ``RankSpec``s. Pure; nothing here imports ray or torch."""

import msgspec

from lockstep.launcher.channels import Seating
from lockstep.launcher.errors import PlacementError
from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.mesh import coordinates
from lockstep.parallel.rank_spec import RankSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Ranks that are all on one host meet where nothing outside it can reach them.
LOOPBACK = "127.0.0.1"
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


# Producer: a WorkerActor, before it starts. Consumer: the driver.
class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where Ray put one rank. ``visible`` is that process's CUDA_VISIBLE_DEVICES, None if unset.

    ``boot_id`` tells whether two processes share a kernel, whatever their hosts are called;
    ``address`` is where other hosts reach this one.
    """

    node_id: str
    address: str
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


def seating_of(places: list[Place]) -> Seating:
    """Which ranks share no memory with the scheduler, which is on rank 0's host."""
    far = tuple(rank for rank, place in enumerate(places) if not _together(places[0], place))
    return Seating(places[0].address if far else LOOPBACK, far)


def specs_from_places(
    places: list[Place], parallel: ParallelConfig, *, device: str, port: int, epoch: int = 0
) -> list[RankSpec]:
    """One ``RankSpec`` a place, in order of global rank; rank 0 listens on ``port``.

    Raises:
        PlacementError: a replica on several hosts, or two ranks on one GPU.
    """
    _check_replicas(places, parallel)
    devices = [device_of(place, device) for place in places]
    _check_distinct(places, devices)
    nodes = [place.node_id for place in places]
    node_ranks = {node: rank for rank, node in enumerate(dict.fromkeys(nodes))}
    return [
        RankSpec(
            global_rank=rank,
            world_size=parallel.world_size,
            dp_rank=coordinates(rank, parallel)[0],
            tp_rank=coordinates(rank, parallel)[1],
            node_rank=node_ranks[nodes[rank]],
            local_rank=nodes[:rank].count(nodes[rank]),
            local_world_size=nodes.count(nodes[rank]),
            device=devices[rank],
            master_addr=seating_of(places).host,
            master_port=port,
            epoch=epoch,
        )
        for rank in range(parallel.world_size)
    ]


def _together(one: Place, other: Place) -> bool:
    return one.boot_id == other.boot_id and one.node_id == other.node_id


def _check_replicas(places: list[Place], parallel: ParallelConfig) -> None:
    for rank, place in enumerate(places):
        dp_rank, tp_rank = coordinates(rank, parallel)
        first = places[rank - tp_rank]
        if not _together(first, place):
            raise PlacementError(
                f"the ranks of a replica must be on one host, but of dp_rank {dp_rank} tp_rank 0 "
                f"is on {first.host} (node {first.node_id[:8]}) and tp_rank {tp_rank} on "
                f"{place.host} (node {place.node_id[:8]})"
            )


def _check_distinct(places: list[Place], devices: list[str]) -> None:
    owner: dict[tuple[str, str], int] = {}
    for rank, (place, device) in enumerate(zip(places, devices, strict=True)):
        taken = owner.setdefault((place.node_id, device), rank)
        if device != "cpu" and taken != rank:
            raise PlacementError(f"ranks {taken} and {rank} were both given {device}")
