"""How long each stage of start-up took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# (stage, done, total): total 0 where it is not known.
Progress = Callable[[str, int, int], None]


class Stages:
    """``seconds`` by stage; tells ``progress`` of each that begins."""

    def __init__(self, progress: Progress | None) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.tell(name, 0, 0)
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began

    def tell(self, stage: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(stage, done, total)
