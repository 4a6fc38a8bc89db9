"""Graphs without a GPU: the recorded callable is called again, on the same static tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostGraph:
    """``replay`` does what the recorded callable did."""

    fn: Callable[[], None]

    def replay(self) -> None:
        self.fn()


class HostSession:
    """Capturing calls once, as a device would record: the ledger then holds what replay does."""

    def warm_up(self, fn: Callable[[], None]) -> None:
        fn()

    def idle(self) -> None:
        """The host is idle when it gets here."""

    def capture(self, fn: Callable[[], None]) -> HostGraph:
        fn()
        return HostGraph(fn)

    def used_bytes(self) -> int:
        return 0


class HostBackend:
    """Lets the whole life of graphs run on a CPU."""

    name = "host"

    @contextmanager
    def session(self) -> Iterator[HostSession]:
        yield HostSession()

    def release(self) -> None:
        """The callables go with the runner's references."""
