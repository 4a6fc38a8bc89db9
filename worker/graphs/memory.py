"""How many bytes are left for the KV cache (pure, no torch)."""

from collections.abc import Iterable, Mapping

from lockstep.comm.messages import GraphCost
from lockstep.worker.graphs.dispatch import BatchDescriptor

_LEAST_GRAPH_BYTES = 1 << 20
_MIB = 1 << 20


def kv_budget(
    *, total_bytes: int, others: Mapping[str, int], utilization: float, least_bytes: int
) -> int:
    """Bytes for the KV cache so that the device is used up to ``utilization``.

    Args:
        others: bytes on the device of all but the KV cache, other processes included, by holder.
        least_bytes: what a KV cache needs to be of use.

    Raises:
        ValueError: less is left; the message has every term and the utilization that would do.
    """
    other_bytes = sum(others.values())
    left = int(total_bytes * utilization) - other_bytes
    if left < least_bytes:
        needed = (other_bytes + least_bytes) / total_bytes
        terms = " + ".join(f"{name} {size / _MIB:.1f}" for name, size in others.items())
        raise ValueError(
            f"gpu_memory_utilization must be at least {needed:.3f}, got {utilization}: "
            f"{terms} = {other_bytes / _MIB:.1f} MiB of {total_bytes / _MIB:.1f} are taken, "
            f"and the KV cache needs {least_bytes / _MIB:.1f}"
        )
    return left


def bytes_of_more_graphs(captured: Iterable[GraphCost], others: Iterable[BatchDescriptor]) -> int:
    """Memory of graphs that share a pool with larger ones of their kind that were captured.

    The first of a kind pays for the pool; each further one is taken to cost as much as the last
    that was captured.
    """
    last = {cost.uniform_query_len: cost.num_bytes for cost in captured}
    return sum(max(_LEAST_GRAPH_BYTES, last[each.uniform_query_len]) for each in others)
