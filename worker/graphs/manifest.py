"""The ordered list of graphs to capture and of every measured choice; one digest for all ranks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec

from lockstep.worker.config import CaptureTime
from lockstep.worker.graphs.dispatch import BatchDescriptor, Dispatcher
from lockstep.worker.graphs.mode import RunMode

_EARLY_OF_A_KIND = 2


class ManifestEntry(msgspec.Struct, frozen=True):
    """One graph: ``run_mode`` is a ``RunMode``."""

    run_mode: int
    descriptor: BatchDescriptor


class Manifest(msgspec.Struct, frozen=True):
    """What every rank captures, in this order, and the choices it captures with.

    ``choices`` are (what, chosen) pairs sorted by what, such as ("all_reduce/8192", "one_shot").
    The last ``num_late`` entries are captured while serving, when a plan orders them.
    """

    entries: tuple[ManifestEntry, ...]
    choices: tuple[tuple[str, str], ...] = ()
    num_late: int = 0

    @property
    def early(self) -> tuple[ManifestEntry, ...]:
        """What is captured before anybody is served."""
        return self.entries[: len(self.entries) - self.num_late]

    @property
    def late(self) -> tuple[ManifestEntry, ...]:
        """What is captured while serving."""
        return self.entries[len(self.entries) - self.num_late :]

    def sizes(self, run_mode: int) -> list[int]:
        """Tokens of each graph of a run mode, in order."""
        return [each.descriptor.num_tokens for each in self.entries if each.run_mode == run_mode]

    def digest(self) -> str:
        """Hex digest, equal on two ranks exactly if their manifests are."""
        return blake2b(msgspec.json.encode(self), digest_size=32).hexdigest()


def build_manifest(
    dispatcher: Dispatcher,
    choices: Mapping[str, str] | None = None,
    capture: CaptureTime = "eager",
) -> Manifest:
    """Graphs of a dispatcher: PIECEWISE before FULL, largest first, so that later ones reuse
    the memory of earlier ones. With ``capture`` lazy the largest of every kind come before all
    others, which are late."""
    entries = tuple(
        ManifestEntry(run_mode, descriptor)
        for run_mode in (RunMode.PIECEWISE, RunMode.FULL)
        for descriptor in dispatcher.descriptors(run_mode)
    )
    early, late = largest_of_each_kind(entries) if capture == "lazy" else (entries, ())
    return Manifest((*early, *late), tuple(sorted((choices or {}).items())), len(late))


def largest_of_each_kind(
    entries: Sequence[ManifestEntry],
) -> tuple[tuple[ManifestEntry, ...], tuple[ManifestEntry, ...]]:
    """(the first two of every kind, the rest): one serves its kind, two tell what another costs."""
    seen = Counter[tuple[int, int, int]]()
    early, late = list[ManifestEntry](), list[ManifestEntry]()
    for entry in entries:
        descriptor = entry.descriptor
        kind = entry.run_mode, descriptor.uniform_query_len, descriptor.num_active_loras
        seen[kind] += 1
        (early if seen[kind] <= _EARLY_OF_A_KIND else late).append(entry)
    return tuple(early), tuple(late)
