"""One start after the other, each with all batches: the engines, their loads, their numbers."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from msgspec import structs

from lockstep.launcher.bench_decode import apart
from lockstep.launcher.bench_decode.device_steps import SteadySteps, device_numbers, steady_steps
from lockstep.launcher.bench_decode.load import Load
from lockstep.launcher.bench_decode.numbers import (
    DecodeRow,
    DecodeRun,
    DeviceNumbers,
    Spread,
    ms_a_step,
    spread,
)
from lockstep.launcher.bench_decode.options import DecodeCommand, DecodeOptions
from lockstep.launcher.child_engine import start_child_engine
from lockstep.launcher.engine import TimedEngine
from lockstep.launcher.front_end import FrontEnd, StartEngine, open_front_end, start_default_engine
from lockstep.launcher.progress import stages
from lockstep.launcher.resolve import Resolved
from lockstep.worker.judge import Answer
from lockstep.worker.models.floor import StepFloor, step_floor
from lockstep.worker.models.footprint import Footprint

_START: dict[str, StartEngine] = {"ray": start_default_engine, "processes": start_child_engine}
# The prompts of a repetition are those of its number, from 1 on.
_WARM_UP_SEED, _GATE_SEED = 0, 1 << 32

Say = Callable[[str], None]


class Batch(NamedTuple):
    """What was measured of one batch."""

    step_ms: Spread
    device: DeviceNumbers | None
    answer: Answer | None


def measure_all(command: DecodeCommand, bytes_per_s: float) -> list[DecodeRun]:
    """Every launcher in every graph mode.

    Raises:
        LaunchError: an engine cannot start, or dies.
    """
    options = command.options
    return [
        _run(command, launcher, mode, bytes_per_s)
        for launcher in options.launchers
        for mode in options.mode_names
    ]


def _run(command: DecodeCommand, launcher: str, mode: str, bytes_per_s: float) -> DecodeRun:
    options, began = command.options, time.perf_counter()
    with _opened(command, launcher, mode) as front:
        load, how = Load(front, options.input_len), front.engine.summary()
        load.seconds(1, 1, seed=_WARM_UP_SEED)
        first_token_s = time.perf_counter() - began
        _say(f"{launcher}, {how.graph_mode}: first token after {first_token_s:.1f} s")
        batches = [_batch(front, load, options, each) for each in options.batch]
    seconds = how.launch_seconds | how.ready[0].stage_seconds | {"first token": first_token_s}
    rows = [
        _row(front.resolved, options, size, batch, bytes_per_s)
        for size, batch in zip(options.batch, batches, strict=True)
    ]
    return DecodeRun(
        launcher=how.launcher,
        graph_mode=how.graph_mode,
        num_graphs=how.num_graphs,
        seconds=seconds,
        rows=_judged(front.resolved, rows, batches),
    )


@contextmanager
def _opened(command: DecodeCommand, launcher: str, mode: str) -> Iterator[FrontEnd]:
    with stages() as progress:
        front = open_front_end(command.launch(mode), _START[launcher], progress)
    try:
        yield front
    finally:
        front.engine.shutdown()


def _batch(front: FrontEnd, load: Load, options: DecodeOptions, size: int) -> Batch:
    num_reqs = size * front.resolved.worker.parallel.dp_size
    load.seconds(num_reqs, options.short_len, seed=_WARM_UP_SEED)
    steps_ms, device = list[float](), list[SteadySteps]()
    for repetition in range(1, options.repetitions + 1):
        short_s = load.seconds(num_reqs, options.short_len, seed=repetition)
        with _noted(front, options, device):
            long_s = load.seconds(num_reqs, options.long_len, seed=repetition)
        steps_ms.append(ms_a_step(short_s, long_s, options.long_len - options.short_len))
        _say(f"batch {size}, {repetition} of {options.repetitions}: {steps_ms[-1]:.3f} ms a step")
    answer = load.answer(num_reqs, seed=_GATE_SEED) if options.gate else None
    return Batch(spread(steps_ms), device_numbers(device), answer)


@contextmanager
def _noted(front: FrontEnd, options: DecodeOptions, steps: list[SteadySteps]) -> Iterator[None]:
    """Add what the first rank of every replica notes of the steps meanwhile.

    The others may still be at the last step when its tokens are out.
    """
    worker = front.resolved.worker
    if not worker.step_timestamps:
        yield
        return
    engine, lens = cast(TimedEngine, front.engine), (options.short_len, options.long_len)
    before = engine.device_times()[:: worker.parallel.tp_size]
    yield
    after = engine.device_times()[:: worker.parallel.tp_size]
    steps += [
        steady_steps(times, num_before=earlier.num_steps, short_len=lens[0], long_len=lens[1])
        for earlier, times in zip(before, after, strict=True)
    ]


def _row(
    resolved: Resolved, options: DecodeOptions, size: int, batch: Batch, bytes_per_s: float
) -> DecodeRow:
    floor = _floor(resolved, options, size)
    step_ms, num_reqs = batch.step_ms.median, size * resolved.worker.parallel.dp_size
    return DecodeRow(
        batch=size,
        step_ms=batch.step_ms,
        tokens_per_s=num_reqs / step_ms * 1e3,
        floor_bytes=floor.num_bytes,
        floor_ms=floor.ms(bytes_per_s),
        share=floor.share(step_ms, bytes_per_s),
        device=batch.device,
    )


def _floor(resolved: Resolved, options: DecodeOptions, size: int) -> StepFloor:
    worker = resolved.worker
    served = structs.replace(worker.model, dtype=worker.dtype)
    return step_floor(Footprint(served, worker.parallel.tp_size), size, options.context_len)


def _judged(resolved: Resolved, rows: list[DecodeRow], batches: Sequence[Batch]) -> list[DecodeRow]:
    answers = [batch.answer for batch in batches if batch.answer is not None]
    if not answers:
        return rows
    _say("holding the answers against the model in plain torch")
    found = apart.judge(resolved.device, resolved.worker, answers)
    return [structs.replace(row, accuracy=each) for row, each in zip(rows, found, strict=True)]


def _say(text: str) -> None:
    sys.stderr.write(f"lockstep: {text}\n")
    sys.stderr.flush()
