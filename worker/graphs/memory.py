"""How many bytes are left for the KV cache (pure, no torch)."""

from collections.abc import Mapping, Sequence

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


def estimate_graph_bytes(measured: Sequence[int], num_graphs: int) -> int:
    """Memory of ``num_graphs`` graphs that share a pool, from those of the largest ones.

    For devices where memory cannot be mapped after capture. The first graph pays for the pool;
    each further one is taken to cost as much as the second.
    """
    if not measured or not num_graphs:
        return 0
    each = max(measured[1], _LEAST_GRAPH_BYTES) if len(measured) > 1 else 0
    return measured[0] + (num_graphs - 1) * each
