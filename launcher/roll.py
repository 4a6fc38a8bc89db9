"""The ranks of a start without Ray tell each other where they are, before anything is loaded."""

import os
import socket
from typing import TYPE_CHECKING

import msgspec

from lockstep.launcher.channels import Seating
from lockstep.launcher.errors import LaunchError
from lockstep.launcher.processes import boot_id
from lockstep.launcher.rank_env import Seat

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MEET_S = 300.0
_KEY = "lockstep/roll"


# Producer and consumer: every rank of a start without Ray.
class Presence(msgspec.Struct, frozen=True):
    """A rank's process, and the address that MASTER_ADDR means on its host."""

    pid: int
    boot_id: str
    node_rank: int
    master: str


def call_roll(store: "Store", seat: Seat) -> list[Presence]:
    """Everybody's, in order of rank.

    Raises:
        CommTimeout: names the ranks that did not come.
        LaunchError: MASTER_ADDR means nothing here.
    """
    from lockstep.comm.rendezvous import exchange

    own = Presence(os.getpid(), boot_id(), seat.node_rank, _resolved(seat.master_addr))
    text, ranks = msgspec.json.encode(own).decode(), range(seat.world_size)
    told = exchange(store, _KEY, text, rank=seat.rank, ranks=ranks, timeout_s=MEET_S)
    return [msgspec.json.decode(told[rank], type=Presence) for rank in ranks]


def seating_of(roll: list[Presence]) -> Seating:
    """Which ranks share no memory with rank 0, and how they reach its host.

    On that host itself its name may well mean loopback, so the first rank elsewhere is asked.
    """
    far = tuple(rank for rank, each in enumerate(roll) if each.node_rank != roll[0].node_rank)
    return Seating(roll[far[0]].master, far) if far else Seating()


def _resolved(name: str) -> str:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"MASTER_ADDR={name!r} cannot be resolved: {error}") from error
    return str(found[0][4][0])
