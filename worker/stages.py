"""How long each stage of start-up took and how much device memory it kept."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lockstep.worker.kv_memory import used_and_total_bytes

# (stage, done, total): total 0 where it is not known.
Progress = Callable[[str, int, int], None]


class Stages:
    """``seconds`` and ``memory_bytes`` by stage; tells ``progress`` of each that begins."""

    def __init__(self, device: torch.device, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self.memory_bytes: dict[str, int] = {}
        self._device = device
        self._progress = progress

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.tell(name, 0, 0)
        began, before = time.perf_counter(), used_and_total_bytes(self._device)[0]
        yield
        self.memory_bytes[name] = used_and_total_bytes(self._device)[0] - before
        self.seconds[name] = time.perf_counter() - began

    def tell(self, stage: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(stage, done, total)
