"""The operations of a step, those of one name and role together."""

import re
from collections.abc import Iterable, Sequence

import msgspec

from lockstep.worker.profiling.operation import Operation, own_times
from lockstep.worker.profiling.roles import adds_residual, is_gated, roles_of
from lockstep.worker.profiling.traffic import Traffic

_TEMPLATE = re.compile(r"<[^<>]*>")


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """What all calls of one kind take together in a step.

    ``role`` is None for what is not known, and so are ``num_bytes`` and ``ceiling_share``, the
    part of the bandwidth ceiling at which these bytes moved.
    """

    name: str
    role: str | None
    calls: int
    time_us: float
    num_bytes: int | None
    ceiling_share: float | None


class _Call(msgspec.Struct, frozen=True):
    name: str
    role: str | None
    time_us: float
    num_bytes: int | None


def group_kernels(
    operations: Sequence[Operation], traffic: Traffic, ceiling: float
) -> list[Kernel]:
    """The longest first.

    Args:
        operations: of one decode step, by time.
        ceiling: bytes a second that the device reads at best.
    """
    groups: dict[tuple[str, str | None], list[_Call]] = {}
    for call in _calls(operations, traffic):
        groups.setdefault((call.name, call.role), []).append(call)
    kernels = [_kernel(calls, ceiling) for calls in groups.values()]
    return sorted(kernels, key=lambda kernel: -kernel.time_us)


def short_name(name: str) -> str:
    """A kernel's name without its return type, template arguments and parameters."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    while (shorter := _TEMPLATE.sub("", plain)) != plain:
        plain = shorter
    if " (" in plain:  # a copy, with its direction
        return plain
    return plain.partition("(")[0].strip() or name


def _calls(operations: Sequence[Operation], traffic: Traffic) -> Iterable[_Call]:
    names = [each.name for each in operations]
    roles = roles_of(names, traffic.footprint.config.num_layers)
    followers, times = [*names[1:], ""], own_times(operations)
    for name, role, follower, time_us in zip(names, roles, followers, times, strict=True):
        num_bytes = traffic.bytes_of(role, gated=is_gated(name))
        if num_bytes is not None and adds_residual(name, role, follower):
            num_bytes += traffic.residual_bytes
        yield _Call(short_name(name), role, time_us, num_bytes)


def _kernel(calls: Sequence[_Call], ceiling: float) -> Kernel:
    first, time_us = calls[0], sum(call.time_us for call in calls)
    known = [call.num_bytes for call in calls if call.num_bytes is not None]
    num_bytes = sum(known) if known else None
    share = num_bytes / (time_us / 1e6) / ceiling if num_bytes and time_us else None
    return Kernel(
        name=first.name,
        role=first.role,
        calls=len(calls),
        time_us=time_us,
        num_bytes=num_bytes,
        ceiling_share=share,
    )
