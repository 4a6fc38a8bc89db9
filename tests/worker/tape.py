"""Graphs without a GPU that forget Python, as CUDA graphs do.

The host backend replays by calling, so a number that Python computes is right at every replay. A
tape holds the tensor operations of one call with the numbers and the addresses that they had, and
a replay does these again. What a device would have to tell the host is refused, as by a host graph.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.worker.graphs.guard import CaptureGuard


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Callable[..., Any], tuple, dict, tuple[Tensor, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if not any(returned.alias_info for returned in returns):
            outputs = (made,) if len(returns) == 1 else tuple(made)
            self.operations.append((func, args, kwargs or {}, outputs))
        elif func._schema.is_mutable:
            # It writes to what was there before; a view needs no replay at all.
            self.operations.append((func, args, kwargs or {}, ()))
        return made


class Tape:
    """One recorded part."""

    def __init__(self, fn: Callable[[], None]) -> None:
        with CaptureGuard(torch.device("cpu")), _Recorder() as recorder:
            fn()
        self._operations = recorder.operations

    def replay(self) -> None:
        for func, args, kwargs, outputs in self._operations:
            again = func(*args, **kwargs)
            for place, value in zip(outputs, [again] if len(outputs) == 1 else again, strict=False):
                place.copy_(value)

    def pool(self) -> Iterator[Tensor]:
        """What the part keeps to itself: nobody else may read it."""
        for *_, outputs in self._operations:
            yield from outputs


class TapeBackend:
    """A ``GraphBackend``, and the session that it opens."""

    name = "tape"

    @contextmanager
    def session(self) -> Iterator["TapeBackend"]:
        yield self

    def warm_up(self, fn: Callable[[], None]) -> None:
        fn()

    def idle(self) -> None:
        """A CPU is idle when it gets here."""

    def capture(self, fn: Callable[[], None]) -> Tape:
        return Tape(fn)

    def used_bytes(self) -> int:
        return 0

    def release(self) -> None:
        """Tapes go with the runner's references."""
