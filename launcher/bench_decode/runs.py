"""One start after the other, each with all batches: the engines, their loads, their numbers."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from msgspec import structs

from lockstep.launcher.bench_decode import apart
from lockstep.launcher.bench_decode.gate import answer
from lockstep.launcher.bench_decode.numbers import DecodeRow, DecodeRun
from lockstep.launcher.bench_decode.options import DecodeCommand, DecodeOptions
from lockstep.launcher.bench_decode.steady_steps import steady_steps
from lockstep.launcher.bench_engine.device_steps import NotedSteps, device_numbers, noted
from lockstep.launcher.bench_engine.engines import WARM_UP_SEED, Opened, opened, say
from lockstep.launcher.bench_engine.numbers import DeviceNumbers, Spread, ms_of_each, spread
from lockstep.launcher.resolve import Resolved
from lockstep.worker.judge import Answer
from lockstep.worker.models.floor import StepFloor, step_floor
from lockstep.worker.models.footprint import Footprint

_GATE_SEED = 1 << 32


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
    return [_run(command, *start, bytes_per_s) for start in command.options.starts]


def _run(command: DecodeCommand, launcher: str, mode: str, bytes_per_s: float) -> DecodeRun:
    options = command.options
    with opened(command.launch(mode), launcher, input_len=options.input_len) as engine:
        batches = [_batch(engine, options, each) for each in options.batch]
    rows = [
        _row(engine.resolved, options, size, batch, bytes_per_s)
        for size, batch in zip(options.batch, batches, strict=True)
    ]
    return engine.run(_judged(engine.resolved, rows, batches))


def _batch(engine: Opened, options: DecodeOptions, size: int) -> Batch:
    load = engine.load
    num_reqs = size * engine.resolved.worker.parallel.dp_size
    prompts = partial(load.prompts, num_reqs, options.input_len)
    pick = partial(steady_steps, short_len=options.short_len, long_len=options.long_len)
    load.seconds(prompts(seed=WARM_UP_SEED), options.short_len)
    steps_ms, device = list[float](), list[NotedSteps]()
    for repetition in range(1, options.repetitions + 1):
        drawn = prompts(seed=repetition)
        short_s = load.seconds(drawn, options.short_len)
        with noted(engine.front, pick, device):
            long_s = load.seconds(drawn, options.long_len)
        steps_ms.append(ms_of_each(short_s, long_s, options.long_len - options.short_len))
        say(f"batch {size}, {repetition} of {options.repetitions}: {steps_ms[-1]:.3f} ms a step")
    judged = answer(load, prompts(seed=_GATE_SEED)) if options.gate else None
    return Batch(spread(steps_ms), device_numbers(device), judged)


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
    say("holding the answers against the model in plain torch")
    found = apart.judge(resolved.device, resolved.worker, answers)
    return [structs.replace(row, accuracy=each) for row, each in zip(rows, found, strict=True)]
