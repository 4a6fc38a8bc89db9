"""The operations of some work, by torch's profiler: of the GPU, or of torch on a CPU."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch._C._autograd import DeviceType

# torch.profiler imports torch's compiler, which takes seconds.
from torch.autograd.profiler import profile
from torch.autograd.profiler_util import FunctionEvent

from lockstep.worker.profiling.operation import Operation

# They allocate memory, or say how it is looked at, without being views.
_NO_WORK = (
    "aten::empty",
    "aten::new_empty",
    "aten::resize_",
    "aten::as_strided_",
    "aten::_unsafe_view",
    "aten::result_type",
)


class ProfilerError(RuntimeError):
    """The profiler does not see what ran."""


def record(device: torch.device, work: Callable[[], object]) -> list[Operation]:
    """Operations that ``work`` starts on ``device``, by time; waits for all of them.

    Raises:
        ProfilerError: there are none, as where the driver lets only its owner look.
    """
    on_gpu = device.type == "cuda"
    use_device = "cuda" if on_gpu else None
    with profile(use_device=use_device, use_cpu=not on_gpu, use_kineto=True) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    events: Iterable[FunctionEvent] = profiler.function_events or ()
    found = _on_gpu(events) if on_gpu else _on_cpu(events)
    if not found:
        raise ProfilerError(
            f"the profiler saw no operation on {device}; KINETO_LOG_LEVEL=3 lets it say why"
        )
    return _from_zero(sorted(found, key=lambda each: each.time_range.start))


def _on_gpu(events: Iterable[FunctionEvent]) -> list[FunctionEvent]:
    return [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]


def _on_cpu(events: Iterable[FunctionEvent]) -> list[FunctionEvent]:
    """Operations that do work and call none that does."""
    working = [e for e in events if e.name.startswith("aten::") and _does_work(e.name)]
    callers = {caller.id for each in working for caller in _callers(each)}
    return [each for each in working if each.id not in callers]


def _callers(event: FunctionEvent) -> Iterator[FunctionEvent]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


def _does_work(name: str) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(name)
    is_view = any(schema._is_view_op() for schema in schemas)
    return not is_view and not name.startswith(_NO_WORK)


def _from_zero(events: list[FunctionEvent]) -> list[Operation]:
    first = events[0].time_range.start
    return [_operation(event, first) for event in events]


def _operation(event: FunctionEvent, first_us: float) -> Operation:
    span = event.time_range
    return Operation(event.name, span.start - first_us, span.end - span.start, event.id)
