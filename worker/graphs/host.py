"""Graphs without a GPU: the recorded callable is called again, on the same static tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lockstep.worker.graphs.errors import GraphError
from lockstep.worker.graphs.guard import CaptureGuard


@dataclass(frozen=True, slots=True)
class HostGraph:
    """``replay`` does what the recorded callable did."""

    fn: Callable[[], None]

    def replay(self) -> None:
        self.fn()


class HostSession:
    """Capturing calls once, as a device would record: the ledger then holds what replay does.

    What a device could not record is refused here as well.
    """

    def __init__(self) -> None:
        self.is_open = True

    def warm_up(self, fn: Callable[[], None]) -> None:
        fn()

    def idle(self) -> None:
        """The host is idle when it gets here."""

    def capture(self, fn: Callable[[], None]) -> HostGraph:
        if not self.is_open:
            raise GraphError("no capture was ordered: the session is over")
        with CaptureGuard(torch.device("cpu")) as guard:
            fn()
        guard.check_kept()
        return HostGraph(fn)

    def used_bytes(self) -> int:
        return 0


class HostBackend:
    """Lets the whole life of graphs run on a CPU."""

    name = "host"

    @contextmanager
    def session(self) -> Iterator[HostSession]:
        session = HostSession()
        try:
            yield session
        finally:
            session.is_open = False

    def release(self) -> None:
        """The callables go with the runner's references."""
