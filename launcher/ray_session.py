"""A connection to Ray: an own local cluster, ended with its engine, or one that was there."""

import atexit
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from lockstep.launcher.errors import StartError
from lockstep.launcher.guard import MARK, Guard

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
        StartError: nothing answers at RAY_ADDRESS, or the cluster refuses the connection.
    """
    if ray.is_initialized():
        return RaySession(connected_here=False, is_local=False)
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _check_reachable(address)
    session = RaySession(connected_here=True, is_local=address is None)
    options = {} if address else _local_options(num_ranks, device)
    try:
        with _marked(os.environ, session.mark), _own_sigterm_handler():
            context: Any = ray.init(logging_level=logging.WARNING, log_to_driver=True, **options)
    except BaseException as error:
        session.close()
        if isinstance(error, AuthenticationError | ConnectionError):
            raise StartError(_refusal(address, error)) from error
        raise
    if session.is_local:
        session.claim(context.address_info["session_dir"])
    return session


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


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Ray replaces the handler of whoever embeds it; put that back, whatever becomes of the start.

    Until then Ray leaves a SIGTERM by a SystemExit with the signal's number: the handler that was
    there is told of it.
    """
    before = signal.getsignal(signal.SIGTERM)
    terminated = False
    try:
        yield
    except SystemExit as left:
        terminated = left.code == signal.SIGTERM
        if not terminated:
            raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    if terminated:
        signal.raise_signal(signal.SIGTERM)


def _refusal(address: str | None, error: Exception) -> str:
    """One line: the cause of a ConnectionError is a traceback as text, which ends with a reason."""
    reason = str(error.__cause__ or error).strip().splitlines()[-1]
    return f"Ray at {address or 'this host'} cannot be joined: {reason}"
