"""What may fail on one rank, given up by all of them together."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")


class Host(Protocol):
    """The host operations by which ranks agree on what works."""

    def all_gather_object(self, obj: Any, timeout_s: float | None = None) -> list[Any]: ...

    def barrier(self, timeout_s: float | None = None) -> None: ...


def agreed(host: Host, reason: str | None) -> str | None:
    """The first reason that any rank has; all ranks get the same answer."""
    return next((found for found in host.all_gather_object(reason) if found is not None), None)


def attempted(host: Host, attempt: Callable[[], _T]) -> tuple[_T | None, str | None]:
    """(what it returned, None) if it raised on no rank, else (None, why); the same on all ranks."""
    result = reason = None
    try:
        result = attempt()
    except Exception as error:  # whatever a driver or a compiler says
        reason = f"{type(error).__name__}: {error}"
    reason = agreed(host, reason)
    return (result, None) if reason is None else (None, reason)
