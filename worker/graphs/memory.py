"""How many bytes are left for the KV cache (pure, no torch)."""

from collections.abc import Sequence

_LEAST_GRAPH_BYTES = 1 << 20


def kv_budget(*, total_bytes: int, other_bytes: int, utilization: float, least_bytes: int) -> int:
    """Bytes for the KV cache so that the device is used up to ``utilization``.

    Args:
        other_bytes: used on the device by all but the KV cache, other processes included.
        least_bytes: what a KV cache needs to be of use.

    Raises:
        ValueError: less is left; the message has the utilization that would do.
    """
    left = int(total_bytes * utilization) - other_bytes
    if left < least_bytes:
        needed = (other_bytes + least_bytes) / total_bytes
        raise ValueError(
            f"gpu_memory_utilization must be at least {needed:.3f}, got {utilization}: of "
            f"{total_bytes} bytes {other_bytes} are in use and the KV cache needs {least_bytes}"
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
