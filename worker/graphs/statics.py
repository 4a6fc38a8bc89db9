"""The contract of addresses: what a graph read at capture must be there at every replay."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from lockstep.worker.graphs.errors import StaleGraphError


class StaticState(Protocol):
    """Owner of the tensors that graphs read and write."""

    @property
    def generation(self) -> int:
        """Counts up whenever the tensors are made anew."""
        ...

    def statics(self) -> Mapping[str, Tensor]:
        """Every tensor whose address a graph may have captured, by name, as it is now."""
        ...


class AddressBook:
    """Generation and addresses at the time of capture."""

    def __init__(self, state: StaticState) -> None:
        self._state = state
        self._generation = state.generation
        self._names = tuple(state.statics())
        self._addresses = _addresses(state)

    def check(self) -> None:
        """Raise StaleGraphError if anything has moved. A few microseconds."""
        state = self._state
        if state.generation != self._generation:
            raise StaleGraphError(
                f"graphs were captured for generation {self._generation} of the static state, "
                f"which is now {state.generation}"
            )
        if _addresses(state) != self._addresses:
            raise StaleGraphError(f"{self._moved()} since the graphs were captured")

    def _moved(self) -> str:
        names = tuple(self._state.statics())
        if names != self._names:
            return f"static tensors {sorted(set(names) ^ set(self._names))} came or went"
        pairs = zip(names, self._addresses, _addresses(self._state), strict=True)
        moved = next(name for name, before, now in pairs if before != now)
        return f"static tensor {moved!r} has moved"


def _addresses(state: StaticState) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in state.statics().values()])
