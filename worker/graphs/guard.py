"""While a graph is captured: refuse what it cannot hold, and say in which line that stands.

A device would break the capture somewhere later, in words of its own; a host would not notice.
"""

import gc
import linecache
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lockstep.worker.graphs.errors import HostSync, OutsidePool

_LET_GO_S = 1.0
_NOT_OURS = (os.path.dirname(torch.__file__), __file__)

# What Python asks of a tensor, by itself or for an ``if``.
_QUESTIONS = {
    getattr(Tensor, name)
    for name in (
        "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__",
    )
}  # fmt: skip
# Operations that need a value on the host, or whose output is as large as their input says.
_DATA_DEPENDENT = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_unique2",
        "unique_dim", "unique_consecutive", "unique_dim_consecutive", "repeat_interleave",
    )
)  # fmt: skip
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class _Place(NamedTuple):
    """A line of code; its text is looked up only when it is told."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {linecache.getline(self.file, self.line).strip()}"


class CaptureGuard:
    """Active as a context; ``check_kept`` follows once the capture has ended.

    Args:
        device: where the graph's tensors lie; numbers alone may come from the host.

    Raises:
        HostSync, OutsidePool: from the line that asks or allocates.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[tuple[StorageWeakRef, _Place]] = []
        self._modes = ExitStack()

    def __enter__(self) -> "CaptureGuard":
        self._modes.enter_context(_Questions())
        self._modes.enter_context(_Operations(self._device, self._made))
        return self

    def __exit__(self, *exc: object) -> None:
        self._modes.close()

    def check_kept(self) -> None:
        """Raise OutsidePool if a tensor made while capturing is still alive.

        Its memory belongs to the pool, and every replay writes there.
        """
        if self._kept():
            gc.collect()
        # A thread of gloo may hold what it has sent for a moment after the collective is over.
        deadline = time.monotonic() + _LET_GO_S
        while self._kept() and time.monotonic() < deadline:
            time.sleep(0.001)
        for place in self._kept():
            raise OutsidePool(f"a tensor made while capturing is kept: {place}")

    def _kept(self) -> list[_Place]:
        return [place for made, place in self._made if not made.expired()]  # type: ignore[no-untyped-call]


@contextmanager
def unguarded() -> Iterator[None]:
    """Pause guards: for a look at host memory, where nothing waits, and for compiled code."""
    with ExitStack() as paused:
        for _ in range(_len_torch_function_stack()):
            paused.enter_context(_pop_mode_temporarily())
        paused.enter_context(_disable_current_modes())
        yield


class _Questions(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _QUESTIONS:
            raise HostSync(f"Tensor.{func.__name__} waits for the device: {_place()}")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: torch.device, made: list[tuple[StorageWeakRef, _Place]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._made = made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip it, torch would import all of it in the middle of the first capture."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _DATA_DEPENDENT or (name in _INDEXING and _has_mask(args[1])):
            raise HostSync(f"{name} waits for the device: {_place()}")
        result = func(*args, **(kwargs or {}))
        given = _tensors((args, kwargs))
        self._check_device(name, given)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [t for t in _tensors(result) if t.untyped_storage()._cdata not in known]
        self._check_device(name, fresh)
        if fresh:
            place = _place()
            self._made += [(_watched(tensor), place) for tensor in fresh]
        return result

    def _check_device(self, name: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.dim() and tensor.device.type != self._device.type:
                raise OutsidePool(f"{name} touches memory of {tensor.device}: {_place()}")


def _watched(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _has_mask(indices: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return any(index is not None and index.dtype in masks for index in indices)


def _place() -> _Place:
    """The innermost line that is not torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_OURS):
        frame = frame.f_back
    return _Place(frame.f_code.co_filename, frame.f_lineno) if frame else _Place("?", 0)
