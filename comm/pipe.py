"""Records between processes of different hosts: what ``ring`` does in memory, over TCP.

A pipe carries records one way between two processes, one of which binds it. zmq's own threads move
them, so that writing does not wait for the network. The connection is encrypted, and only a process
that was told the key of the bound end can make one.
"""

import time
from typing import Any, Self

import msgspec
import zmq

from lockstep.comm.errors import CommError, CommTimeout

_CHECK_S = 0.2
# A host that is gone says nothing: its silence must.
_HEARTBEAT_MS = 1000
_SILENCE_MS = 5000
_LINGER_S = 2.0
_CLOSING_S = 0.002


# Producer: the process that binds. Consumer: the one that connects.
class PipeAddress(msgspec.Struct, frozen=True, tag="pipe"):
    """Where a pipe is bound, and the key without which nobody can use it."""

    endpoint: str
    key: bytes


class PipeHub:
    """Binds pipes on one address of this host. Close it after them.

    What travels is bounded by those who use it (a scheduler's run-ahead), not by a pipe.
    """

    def __init__(self, host: str) -> None:
        self._host = f"[{host}]" if ":" in host else host
        self._context = zmq.Context()
        self._key, self._secret = zmq.curve_keypair()

    def reader(self) -> "PipeReader":
        """A pipe that is read here; its ``address`` is for the one that writes."""
        return PipeReader(*self._bound())

    def writer(self) -> "PipeWriter":
        """A pipe that is written here; its ``address`` is for the one that reads."""
        return PipeWriter(*self._bound())

    def close(self) -> None:
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bound(self) -> tuple["zmq.Socket[bytes]", PipeAddress]:
        socket = _socket(self._context)
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        try:
            port = socket.bind_to_random_port(f"tcp://{self._host}")
        except zmq.ZMQError as error:
            socket.close()
            raise CommError(f"no pipe can be bound on {self._host}: {error}") from error
        return socket, PipeAddress(f"tcp://{self._host}:{port}", self._key)


class _End:
    """One end of a pipe. One thread at a time."""

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        address: PipeAddress,
        context: "zmq.Context[Any] | None" = None,
    ) -> None:
        self.address = address
        self._socket = socket
        self._context = context
        self._attached = False

    @classmethod
    def connect(cls, address: PipeAddress) -> Self:
        """The end of a process that was told the address."""
        context = zmq.Context()
        socket = _socket(context)
        socket.curve_serverkey = address.key
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(address.endpoint)
        return cls(socket, address, context)

    def close(self) -> None:
        """Detach."""
        self._socket.close()
        if self._context is not None:
            self._context.term()

    def _peer_gone(self) -> bool:
        """True once the process at the other end, which was there, is not any more."""
        attached = self._can(zmq.POLLOUT)
        self._attached = self._attached or attached
        return self._attached and not attached

    def _can(self, what: int) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & what)


class PipeWriter(_End):
    """The one writer of a pipe."""

    def write(self, data: bytes, timeout_s: float = 10.0) -> None:
        """Append one record.

        Raises:
            CommTimeout: the reader did not attach in time, or is gone.
        """
        deadline = time.monotonic() + timeout_s
        while not self._sent(data):
            left_s = deadline - time.monotonic()
            if self._peer_gone():
                raise CommTimeout(f"the reader of {self.address.endpoint} is gone")
            if left_s <= 0:
                raise CommTimeout(
                    f"the reader of {self.address.endpoint} did not attach for {timeout_s:g} s"
                )
            self._socket.poll(_milliseconds(min(left_s, _CHECK_S)), zmq.POLLOUT)

    def close(self) -> None:
        """Detach once the reader has, which would lose what it has not read, or in two seconds."""
        deadline = time.monotonic() + _LINGER_S
        while self._attached and not self._peer_gone() and time.monotonic() < deadline:
            time.sleep(_CLOSING_S)
        super().close()

    def _sent(self, data: bytes) -> bool:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._attached = True
        return True


class PipeReader(_End):
    """The one reader of a pipe."""

    def poll(self) -> bytes | None:
        """The next record, or None at once if there is none."""
        if not self._can(zmq.POLLIN):
            return None
        return self._socket.recv(zmq.NOBLOCK)

    def read(self, timeout_s: float) -> bytes | None:
        """The next record, or None after ``timeout_s``.

        Raises:
            CommError: everything is read and the writer has closed the pipe or is gone.
        """
        deadline = time.monotonic() + timeout_s
        while (data := self.poll()) is None:
            if self._peer_gone():
                return self._rest()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            self._socket.poll(_milliseconds(min(left_s, _CHECK_S)))
        return data

    def _rest(self) -> bytes:
        data = self.poll()
        if data is None:
            raise CommError(f"the writer of {self.address.endpoint} has closed the pipe or is gone")
        return data


def _socket(context: "zmq.Context[Any]") -> "zmq.Socket[bytes]":
    """A pair without limits, so that it can be written to if and only if its peer is there."""
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.linger = round(_LINGER_S * 1000)
    socket.ipv6 = True
    socket.hwm = 0
    socket.immediate = True
    # A second connection would hide that records of the first were lost.
    socket.reconnect_ivl = -1
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _SILENCE_MS
    return socket


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
