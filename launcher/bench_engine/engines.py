"""Engines that are started to be measured."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from lockstep.launcher.bench_engine.load import Load
from lockstep.launcher.bench_engine.numbers import BenchRun, Row
from lockstep.launcher.child_engine import start_child_engine
from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.engine import EngineSummary
from lockstep.launcher.front_end import FrontEnd, StartEngine, open_front_end, start_default_engine
from lockstep.launcher.progress import stages
from lockstep.launcher.resolve import Resolved

_START: dict[str, StartEngine] = {"ray": start_default_engine, "processes": start_child_engine}
# Repetitions count theirs from 1.
WARM_UP_SEED = 0


class Opened(NamedTuple):
    """A started engine. ``seconds`` are those of its stages and of the first token."""

    front: FrontEnd
    load: Load
    how: EngineSummary
    seconds: dict[str, float]

    @property
    def resolved(self) -> Resolved:
        return self.front.resolved

    def run(self, rows: list[Row]) -> BenchRun[Row]:
        """What it was and what came of it; it may have ended."""
        return BenchRun(
            launcher=self.how.launcher,
            graph_mode=self.how.graph_mode,
            num_graphs=self.how.num_graphs,
            seconds=self.seconds,
            rows=rows,
        )


@contextmanager
def opened(config: LaunchConfig, launcher: str, *, input_len: int) -> Iterator[Opened]:
    """An engine that has answered one prompt of that length; it ends with the context.

    Raises:
        LaunchError: it cannot start.
    """
    began = time.perf_counter()
    with stages() as progress:
        front = open_front_end(config, _START[launcher], progress)
    try:
        load, how = Load(front), front.engine.summary()
        load.seconds(load.prompts(1, input_len, seed=WARM_UP_SEED), 1)
        first_token_s = time.perf_counter() - began
        say(f"{launcher}, {how.graph_mode}: first token after {first_token_s:.1f} s")
        seconds = how.launch_seconds | how.ready[0].stage_seconds | {"first token": first_token_s}
        yield Opened(front, load, how, seconds)
    finally:
        front.engine.shutdown()


def say(text: str) -> None:
    """A line about the progress."""
    sys.stderr.write(f"lockstep: {text}\n")
    sys.stderr.flush()
