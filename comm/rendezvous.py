"""How ranks find each other: a store on a port that its owner has bound, joined by a deadline."""

import os
from collections.abc import Iterable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lockstep.comm.errors import CommError, CommTimeout

_MIB = 1 << 20


def serve_store(
    host: str, world_size: int, timeout_s: float, *, port: int = 0
) -> tuple[TCPStore, int]:
    """Bind a store on a port chosen by the system; returns it with that port.

    The port is bound here and handed on, so nobody can take it in between. ``port`` is for where
    somebody else has chosen already (MASTER_PORT). The store lives as long as the returned object.
    """
    store = TCPStore(
        host, port, world_size, is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    return store, store.port


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to a served store. Raises CommTimeout that names the address."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        message = f"no store answers at {host}:{port} within {timeout_s:g} s"
        raise CommTimeout(message) from error


def exchange(
    store: Store, key: str, value: str, *, rank: int, ranks: Iterable[int], timeout_s: float
) -> dict[int, str]:
    """Publish ``value`` and return everybody's, by rank.

    Raises:
        CommTimeout: names the ranks that did not publish theirs in time.
    """
    scoped = PrefixStore(key, store)
    scoped.set(str(rank), value)
    names = {other: str(other) for other in ranks}
    try:
        scoped.wait(list(names.values()), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [other for other, name in names.items() if not scoped.check([name])]
        message = f"{key}: ranks {missing} did not show up within {timeout_s:g} s"
        raise CommTimeout(message) from error
    return {other: scoped.get(name).decode() for other, name in names.items()}


def preflight_shared_memory(min_bytes: int, path: str = "/dev/shm") -> None:
    """Refuse to start on a host whose shared memory is too small for NCCL or Ray.

    Raises:
        CommError: says how much is there, how much is needed, and the flag that helps.
    """
    stats = os.statvfs(path)
    free = stats.f_bavail * stats.f_frsize
    if free < min_bytes:
        raise CommError(
            f"{path} has {free // _MIB} MiB free and {-(-min_bytes // _MIB)} MiB are needed; "
            f"in a container, start it with a larger one (docker run --shm-size=8g)"
        )
