"""Placement groups: one a replica, a bundle a rank; and why they cannot be had."""

import logging
import time
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from lockstep.launcher.errors import PlacementError
from lockstep.parallel.config import ParallelConfig

logger = logging.getLogger(__name__)

PREFIX = "lockstep"
_RECHECK_S = 0.2
_PATIENCE_S = 5.0


class Reservation:
    """The placement groups of one engine, owned by this driver."""

    def __init__(self, parallel: ParallelConfig, *, owner: str, device: str) -> None:
        self.owner = owner
        self.resource = "CPU" if device == "cpu" else "GPU"
        self._tp_size = parallel.tp_size
        self.groups: list[PlacementGroup] = [
            placement_group(
                [{self.resource: 1}] * parallel.tp_size,
                strategy="STRICT_PACK",
                name=f"{owner}/replica-{replica}",
            )
            for replica in range(parallel.dp_size)
        ]

    def wait(self, timeout_s: float, *, fixed_size: bool) -> None:
        """Return once every group is placed. ``fixed_size``: no host can join the cluster.

        A wait that lasts is told of once, in the log.

        Raises:
            PlacementError: not within ``timeout_s``; says what is needed, there, and held by whom.
        """
        began = time.monotonic()
        told = False
        for group in self.groups:
            while not group.wait(timeout_seconds=_RECHECK_S):
                hopeless = fixed_size and self._too_large()
                waited_s = time.monotonic() - began
                if hopeless or waited_s > timeout_s:
                    raise PlacementError(self._diagnosis(waited_s))
                if waited_s > _PATIENCE_S and not told:
                    told = True
                    diagnosis = self._diagnosis(waited_s)
                    logger.warning("%s Waiting for up to %.0f s.", diagnosis, timeout_s)

    def _too_large(self) -> bool:
        """True if the cluster as it is cannot hold the groups, even when nothing else runs."""
        largest = [int(n // self._tp_size) for n in _per_node(self.resource)]
        return sum(largest) < len(self.groups)

    def place(self, global_rank: int) -> tuple[PlacementGroup, int]:
        """Group and bundle of a rank."""
        replica, bundle = divmod(global_rank, self._tp_size)
        return self.groups[replica], bundle

    def release(self) -> None:
        for group in self.groups:
            remove_placement_group(group)

    def _diagnosis(self, waited_s: float) -> str:
        name, ours = self.resource, {group.id.hex() for group in self.groups}
        per_node = _per_node(name)
        unused = ray.available_resources()  # type: ignore[no-untyped-call]
        placed = {
            key: (entry["name"] or key, amount)
            for key, entry in placement_group_table().items()
            if entry["state"] == "CREATED" and (amount := _amount(entry, name))
        }
        # What some of ours have found is theirs only until the others' time is over.
        free = unused.get(name, 0) + sum(placed[key][1] for key in ours & placed.keys())
        held = [f"{who} ({amount:g})" for key, (who, amount) in placed.items() if key not in ours]
        return (
            f"the ranks found no place in {waited_s:.0f} s: need {len(self.groups)} x "
            f"{self._tp_size} {name}, each {self._tp_size} on one host; have "
            f"{sum(per_node):g} {name} on {len(per_node)} host(s){_each(per_node)}, "
            f"{free:g} free; held by "
            f"{', '.join(held) or 'no other placement group'}. `ray status` shows more."
        )


def owner_name(process: int, mark: str) -> str:
    """Name of an engine's groups; begins alike for all engines of one process."""
    return f"{PREFIX}-{process}-{mark}"


def others_of(process: int, mark: str) -> bool:
    """True if another engine of ``process`` holds placement groups."""
    names = [
        entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"
    ]
    prefix, own = f"{PREFIX}-{process}-", owner_name(process, mark)
    return any(name.startswith(prefix) and not name.startswith(own) for name in names)


def _per_node(resource: str) -> list[float]:
    return [
        node["Resources"][resource]
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"] and node["Resources"].get(resource)
    ]


def _each(per_node: list[float]) -> str:
    return f" with {', '.join(f'{amount:g}' for amount in per_node)}" if len(per_node) > 1 else ""


def _amount(entry: dict[str, Any], resource: str) -> float:
    return sum(float(bundle.get(resource, 0)) for bundle in entry["bundles"].values())
