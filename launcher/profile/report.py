"""What ``lockstep profile`` found, as data."""

import msgspec

from lockstep.launcher.profile.bound import Bound, StepCosts, explain
from lockstep.launcher.profile.kernels import Kernel, group_kernels
from lockstep.worker.models.floor import step_floor
from lockstep.worker.models.footprint import Footprint
from lockstep.worker.profiling.decode import StepRecord
from lockstep.worker.profiling.operation import Operation, num_submissions, own_times
from lockstep.worker.profiling.roles import roles_of
from lockstep.worker.profiling.traffic import Traffic


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The device: its name, bytes a second that it reads at best, host time of a launch there."""

    name: str
    is_gpu: bool
    ceiling_bytes_per_s: float
    launch_us: float


class Span(msgspec.Struct, frozen=True):
    """An operation on the device's clock, in microseconds from the step's first."""

    role: str | None
    start_us: float
    duration_us: float


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One batch in one run mode. ``floor_us`` is what reading weights and KV alone would take."""

    run_mode: str
    num_reqs: int
    num_tokens: int
    context_len: int
    costs: StepCosts
    bound: Bound
    explanation: str
    floor_us: float
    kernels: list[Kernel]
    timeline: list[Span]


class BatchProfile(msgspec.Struct, frozen=True):
    """The same batch without graphs and with them; None where no graph serves it."""

    eager: StepProfile
    graphs: StepProfile | None


class ProfileReport(msgspec.Struct, frozen=True):
    """All batches of a model on a machine, as its rank 0 saw them."""

    model: str
    dtype: str
    tensor_parallel_size: int
    machine: Machine
    batches: list[BatchProfile]


def step_profile(record: StepRecord, footprint: Footprint, machine: Machine) -> StepProfile:
    """What a recorded step says.

    Args:
        footprint: of the rank that recorded it, in the dtype that it computes in.
    """
    floor = step_floor(footprint, record.num_reqs, record.context_len)
    traffic = Traffic(footprint, record.num_reqs, record.num_tokens, record.context_len)
    costs = _costs(record, machine)
    return StepProfile(
        run_mode=record.run_mode,
        num_reqs=record.num_reqs,
        num_tokens=record.num_tokens,
        context_len=record.context_len,
        costs=costs,
        bound=costs.bound,
        explanation=explain(costs),
        floor_us=floor.ms(machine.ceiling_bytes_per_s) * 1e3,
        kernels=group_kernels(record.operations, traffic, machine.ceiling_bytes_per_s),
        timeline=_timeline(record.operations, footprint.config.num_layers),
    )


def _costs(record: StepRecord, machine: Machine) -> StepCosts:
    device_us = sum(own_times(record.operations))
    host_us = record.host_us
    if not machine.is_gpu:
        # There the launching call does the work itself, and the rest of it is the host's.
        host_us = max(0.0, host_us - device_us)
    return StepCosts(
        device="GPU" if machine.is_gpu else "CPU",
        num_operations=len(record.operations),
        num_submissions=num_submissions(record.operations),
        launch_us=machine.launch_us,
        device_us=device_us,
        host_us=host_us,
        step_us=record.step_us,
    )


def _timeline(operations: list[Operation], num_layers: int) -> list[Span]:
    roles = roles_of([each.name for each in operations], num_layers)
    return [
        Span(role, each.start_us, each.duration_us)
        for role, each in zip(roles, operations, strict=True)
    ]
