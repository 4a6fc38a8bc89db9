"""Do all ranks of a lockstep group capture the same graphs, in the same order?"""

from collections.abc import Iterator
from itertools import zip_longest

import msgspec

from lockstep.comm.collectives import Communicator
from lockstep.comm.compare import odd_one_out
from lockstep.comm.errors import RankMismatch
from lockstep.worker.graphs.manifest import Manifest, ManifestEntry
from lockstep.worker.graphs.mode import RunMode


def compare_manifests(manifest: Manifest, over: Communicator) -> None:
    """Compare over a group, before the first capture.

    Raises:
        RankMismatch: on every rank; names the rank and the first difference.
    """
    odd = odd_one_out(over.all_gather_object(manifest.digest()))
    if odd is None:
        return
    manifests = [msgspec.convert(found, Manifest) for found in over.all_gather_object(manifest)]
    left, right = (_lines(manifests[index]) for index in odd)
    ours, theirs = next(
        (one, other) for one, other in zip_longest(left, right, fillvalue="nothing") if one != other
    )
    ranks = [over.ranks[index] for index in odd]
    raise RankMismatch(
        f"manifests differ: rank {ranks[0]} has {ours}, where rank {ranks[1]} has {theirs}"
    )


def _lines(manifest: Manifest) -> Iterator[str]:
    for what, chosen in manifest.choices:
        yield f"{what} = {chosen}"
    for position, entry in enumerate(manifest.entries):
        yield f"{_name(entry)} at position {position}"


def _name(entry: ManifestEntry) -> str:
    descriptor = entry.descriptor
    return (
        f"{RunMode(entry.run_mode).name} size {descriptor.num_tokens} "
        f"(num_reqs {descriptor.num_reqs}, query_len {descriptor.uniform_query_len}, "
        f"loras {descriptor.num_active_loras})"
    )
