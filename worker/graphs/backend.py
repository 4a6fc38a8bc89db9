"""What a device must offer so that steps can be captured and replayed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Captured(Protocol):
    """One part of a step, ready to be replayed."""

    def replay(self) -> None:
        """Launch it on the current stream; does not wait."""
        ...


class CaptureSession(Protocol):
    """The state in which capturing is allowed. ``GraphRunner`` opens it, once, in plan order."""

    def warm_up(self, fn: Callable[[], None]) -> None:
        """Call ``fn`` eagerly where it will be captured, so that capture does nothing first."""
        ...

    def idle(self) -> None:
        """Wait until the device has nothing left to do."""
        ...

    def capture(self, fn: Callable[[], None]) -> Captured:
        """Record ``fn``. An exception of ``fn`` comes out as it is, and the session is over."""
        ...

    def used_bytes(self) -> int:
        """Device memory in use, 0 where that is not known."""
        ...


class GraphBackend(Protocol):
    """Makes capture sessions of one device. Its graphs share one pool and live as a set."""

    name: str

    def session(self) -> AbstractContextManager[CaptureSession]:
        """Allow capturing until the block ends."""
        ...

    def release(self) -> None:
        """Drop all graphs at once. Comes before the process groups they use are destroyed."""
        ...
