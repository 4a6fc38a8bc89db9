"""Garbage collection of a process that serves: a pause of one rank is a pause of all its peers."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Heap:
    """Everything alive at ``freeze`` is never looked at again; pauses are measured from then on.

    ``longest_pause_s`` is what a collection kept the process from its work, ``longest_pause_cpu_s``
    without what other processes took meanwhile.
    """

    def __init__(self) -> None:
        self.longest_pause_s = 0.0
        self.longest_pause_cpu_s = 0.0
        self.num_collections = 0
        # None outside of a collection: another thread may register this during one.
        self._began: tuple[float, float] | None = None

    def freeze(self) -> None:
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self._note)

    def thaw(self) -> None:
        gc.callbacks.remove(self._note)
        gc.unfreeze()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def _note(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter(), time.thread_time()
        if phase == "start":
            self._began = now
        elif self._began is not None:
            wall_s, cpu_s = now[0] - self._began[0], now[1] - self._began[1]
            self._began = None
            self.num_collections += 1
            self.longest_pause_s = max(self.longest_pause_s, wall_s)
            self.longest_pause_cpu_s = max(self.longest_pause_cpu_s, cpu_s)
