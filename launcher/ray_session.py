"""A connection to Ray: an own local cluster, ended with its engine, or one that was there."""

import atexit
import logging
import os
import secrets
import socket
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import ray

from lockstep.launcher.errors import StartError
from lockstep.launcher.guard import MARK, Guard
from lockstep.launcher.held_signals import held_signals

_REACH_S = 5.0
OBJECT_STORE_BYTES = 80 << 20
# Each actor gets a process with an environment of its own, so those that Ray would start ahead
# only take memory. With the second setting a killed head ends its processes in seconds.
_SYSTEM_CONFIG = {
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    "gcs_rpc_server_reconnect_timeout_s": 5,
}


class RaySession:
    """Ray as one engine uses it. Everything the engine starts carries ``mark``.

    ``is_local``: the cluster was started here, and no host will join it.
    """

    def __init__(self, *, connected_here: bool, is_local: bool) -> None:
        self.mark = secrets.token_hex(8)
        self.is_local = is_local
        self._connected_here = connected_here
        self._guard = Guard(self.mark)

    def claim(self, directory: str) -> None:
        """Say where the own cluster keeps its files."""
        self._guard.claim(directory)

    def close(self, *, others: bool = False) -> bool:
        """Disconnect, end an own cluster, see all that is marked gone. Safe to call twice.

        With ``others`` (engines of this process that use the same Ray) an own cluster stays until
        the process ends. Returns False if something marked could not be ended.
        """
        if others and self._connected_here:
            atexit.register(self.close)
            return True
        if self._connected_here and ray.is_initialized():
            ray.shutdown()
        return self._guard.finish()


def open_session(*, num_ranks: int, device: str) -> RaySession:
    """Use the Ray this process is connected to, else that of RAY_ADDRESS, else start one.

    Raises:
        StartError: nothing answers at RAY_ADDRESS, the cluster refuses the connection, or a Ray of
            our own does not come up; with Ray's reason.
    """
    if ray.is_initialized():
        return RaySession(connected_here=False, is_local=False)
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _check_reachable(address)
    session = RaySession(connected_here=True, is_local=address is None)
    options = {} if address else _local_options(num_ranks, device)
    try:
        with held_signals(), _marked(os.environ, session.mark):
            context = _init(address, options)
    except BaseException:
        session.close()
        raise
    if session.is_local:
        session.claim(context.address_info["session_dir"])
    return session


def _init(address: str | None, options: dict[str, Any]) -> Any:
    """Ray has no type for what keeps it from a start: often it is a bare Exception."""
    try:
        return ray.init(logging_level=logging.WARNING, log_to_driver=True, **options)
    except Exception as error:
        failure = f"at {address} cannot be joined" if address else "cannot start on this host"
        raise StartError(f"Ray {failure}: {_reason(error)}") from error


def _check_reachable(address: str) -> None:
    """Ray itself would wait for a minute, deaf to signals."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except OSError as error:
        raise StartError(f"RAY_ADDRESS={address}: nothing answers there: {error}") from None


def _local_options(num_ranks: int, device: str) -> dict[str, Any]:
    options = {
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "num_cpus": max(os.cpu_count() or 1, num_ranks),
        "_system_config": _SYSTEM_CONFIG,
    }
    return options | ({"num_gpus": 0} if device == "cpu" else {})


@contextmanager
def _marked(env: MutableMapping[str, str], mark: str) -> Iterator[None]:
    """Ray's daemons inherit the mark; other children of this process, later, must not."""
    env[MARK] = mark
    try:
        yield
    finally:
        del env[MARK]


def _reason(error: Exception) -> str:
    """One line. A ConnectionError's cause tells more; a traceback as text ends with a reason."""
    cause = error.__cause__ if isinstance(error, ConnectionError) else None
    text = str(cause or error) or type(error).__name__
    return text.strip().splitlines()[-1] if "Traceback" in text else " ".join(text.split())
