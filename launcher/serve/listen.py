"""The socket of a server, bound before anything that takes long."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lockstep.launcher.errors import ConfigError
from lockstep.launcher.serve.options import ServeOptions


@contextmanager
def listening_socket(options: ServeOptions) -> Iterator[socket.socket]:
    """As ``open_socket``; at the end it is closed, and a Unix socket's file gone if it is ours."""
    with open_socket(options) as sock:
        own = _file_of(options.uds)
        try:
            yield sock
        finally:
            if options.uds and own is not None and own == _file_of(options.uds):
                os.unlink(options.uds)


def _file_of(path: str | None) -> tuple[int, int] | None:
    """Which file it is, whatever its name."""
    with suppress(FileNotFoundError):
        if path is not None:
            found = os.stat(path)
            return found.st_dev, found.st_ino
    return None


def open_socket(options: ServeOptions) -> socket.socket:
    """Bound, not yet listening.

    Raises:
        ConfigError: the address cannot be bound; names it.
    """
    try:
        return _bind_path(options.uds) if options.uds else _bind(options.host, options.port)
    except OSError as error:
        where = options.uds or f"{options.host} port {options.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from error


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # A port whose last connections have just ended is free.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _bind_path(path: str) -> socket.socket:
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(errno.EADDRINUSE, "what is there is no socket")
        _refuse_if_live(path)
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
    except OSError:
        sock.close()
        raise
    return sock


def _refuse_if_live(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(path) == 0:
            raise OSError(errno.EADDRINUSE, "a server listens there")


def url_of(sock: socket.socket, options: ServeOptions) -> str:
    """Where clients find it."""
    if options.uds:
        return f"unix:{options.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
