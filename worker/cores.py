"""How many cores this process may use, which in a container is rarely what the machine has."""

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_cores(groups: Path = _GROUPS, own: Path = _OWN) -> int:
    """The cores that this process is bound to, or fewer if a quota of its control groups is less.

    Args:
        groups: where control groups (version 2) are mounted; without them there is no quota.
        own: names the process's own.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _ancestry(groups, own) if (quota := _quota(folder)) is not None]
    return max(1, min([cores, *map(int, quotas)]))


def _ancestry(groups: Path, own: Path) -> list[Path]:
    """The process's control group and those around it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    path = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    inner = groups / path
    return [inner, *(outer for outer in inner.parents if outer.is_relative_to(groups))]


def _quota(folder: Path) -> float | None:
    """Cores' worth of time that a control group gets, None if it has no limit."""
    try:
        limit, _, period = (folder / "cpu.max").read_text().partition(" ")
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
