"""The ordered list of graphs to capture and of every measured choice; one digest for all ranks."""

from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from lockstep.worker.graphs.dispatch import BatchDescriptor, Dispatcher
from lockstep.worker.graphs.mode import RunMode


class ManifestEntry(msgspec.Struct, frozen=True):
    """One graph: ``run_mode`` is a ``RunMode``."""

    run_mode: int
    descriptor: BatchDescriptor


class Manifest(msgspec.Struct, frozen=True):
    """What every rank captures, in this order, and the choices it captures with.

    ``choices`` are (what, chosen) pairs sorted by what, such as ("all_reduce/8192", "one_shot").
    """

    entries: tuple[ManifestEntry, ...]
    choices: tuple[tuple[str, str], ...] = ()

    def sizes(self, run_mode: int) -> list[int]:
        """Tokens of each graph of a run mode, in order."""
        return [each.descriptor.num_tokens for each in self.entries if each.run_mode == run_mode]

    def digest(self) -> str:
        """Hex digest, equal on two ranks exactly if their manifests are."""
        return blake2b(msgspec.json.encode(self), digest_size=32).hexdigest()


def build_manifest(dispatcher: Dispatcher, choices: Mapping[str, str] | None = None) -> Manifest:
    """Graphs of a dispatcher: PIECEWISE before FULL, largest first, so that later ones reuse
    the memory of earlier ones."""
    entries = tuple(
        ManifestEntry(run_mode, descriptor)
        for run_mode in (RunMode.PIECEWISE, RunMode.FULL)
        for descriptor in dispatcher.descriptors(run_mode)
    )
    return Manifest(entries, tuple(sorted((choices or {}).items())))
