"""Who holds how much of a rank's device: parts that add up to what is used."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.worker.device_bytes import DeviceBytes

Parts = dict[str, int]


class MemoryAccount:
    """Opened before anything is loaded; what lies on the device by then is not this rank's doing.

    Args:
        read: the device at this moment.
        buffer_bytes: communication buffers that exist already.
    """

    def __init__(self, read: Callable[[], DeviceBytes], buffer_bytes: int) -> None:
        self._read = read
        self._communication = buffer_bytes
        self._before_start = read().outside - buffer_bytes

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """What the device loses meanwhile, other than to torch, is held by communication."""
        before = self._read().outside
        yield
        self._communication += self._read().outside - before

    def parts(self, *, weights: int, graphs: int, kv_cache: int, kv_in_torch: int) -> Parts:
        """Bytes by what holds them, as it is now.

        ``workspaces`` are torch's beside weights and graphs: activations, static state, and what
        its allocator keeps for them. ``driver`` is the rest that came since the start: loaded
        kernels, handles of libraries, and whatever other processes took or gave back meanwhile.
        Where nobody counts, only what is known by its tensors.

        Args:
            graphs: that the device lost while graphs were captured, their pool included.
            kv_in_torch: the part of ``kv_cache`` that torch's allocator holds.
        """
        now = self._read()
        if not now.total:
            return {"weights": weights, "kv_cache": kv_cache}
        parts = {
            "weights": weights,
            "workspaces": now.reserved - now.pooled - weights - kv_in_torch,
            "graphs": graphs,
            "communication": self._communication,
            "kv_cache": kv_cache,
            "before_start": self._before_start,
        }
        return parts | {"driver": now.used - sum(parts.values())}
