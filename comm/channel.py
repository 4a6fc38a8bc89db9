"""Records one way between processes: a ring on one host, a pipe between hosts, one interface."""

from collections.abc import Sequence
from typing import Protocol

from lockstep.comm.pipe import PipeAddress, PipeReader, PipeWriter
from lockstep.comm.ring import RingAddress, RingReader, RingWriter

ChannelAddress = RingAddress | PipeAddress


class ChannelWriter(Protocol):
    """What ``RingWriter`` and ``PipeWriter`` promise."""

    def write(self, data: bytes, timeout_s: float = ...) -> None: ...

    def close(self) -> None: ...


class ChannelReader(Protocol):
    """What ``RingReader`` and ``PipeReader`` promise; ``read`` notices that the writer is gone."""

    def poll(self) -> bytes | None: ...

    def read(self, timeout_s: float) -> bytes | None: ...

    def close(self) -> None: ...


class FanOut:
    """One writer to readers on several hosts: each record goes to all of ``writers``."""

    def __init__(self, writers: Sequence[ChannelWriter]) -> None:
        self._writers = writers

    def write(self, data: bytes, timeout_s: float = 10.0) -> None:
        """Append one record for all readers. Raises CommTimeout as each writer does."""
        for writer in self._writers:
            writer.write(data, timeout_s)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def open_reader(address: ChannelAddress, index: int) -> ChannelReader:
    """Attach to a channel that another process owns, as reader ``index`` if it is a ring."""
    if isinstance(address, PipeAddress):
        return PipeReader.connect(address)
    return RingReader(address, index)


def open_writer(address: ChannelAddress) -> ChannelWriter:
    """Attach to a channel that another process owns, as its one writer."""
    if isinstance(address, PipeAddress):
        return PipeWriter.connect(address)
    return RingWriter(address)
