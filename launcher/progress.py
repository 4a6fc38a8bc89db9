"""How long things take, on standard error: bars for a person, lines for a log."""

import sys
import time
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_LINE_EVERY_S = 10.0


class StageLines:
    """Writes a line when a stage begins, every ten seconds of it, and when it ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stage: str | None = None
        self._began = self._written = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._end(now)
            self._stage, self._began, self._written = stage, now, now
            self._write(f"{stage} ...")
        elif now - self._written >= _LINE_EVERY_S and done < (total or done + 1):
            self._written = now
            self._write(
                f"{stage}: {done / total:.0%}" if total else f"{stage}: {now - self._began:.0f} s"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._end(time.monotonic())

    def _end(self, now: float) -> None:
        if self._stage is not None:
            self._write(f"{self._stage}: {now - self._began:.1f} s")
        self._stage = None

    def _write(self, line: str) -> None:
        self._stream.write(f"lockstep: {line}\n")
        self._stream.flush()


class StageBars:
    """One bar a stage; a stage without a total pulses."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._end_all()
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._end_all()
        self._bars.stop()

    def _end_all(self) -> None:
        for task in self._tasks.values():
            self._bars.update(task, completed=1, total=1)


def stages() -> StageLines | StageBars:
    """For the stages of a start-up."""
    if sys.stderr.isatty():
        return StageBars(Console(stderr=True))
    return StageLines(sys.stderr)
