"""One start after the other, each with all prompts: the engines, their loads, their numbers."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from lockstep.launcher.bench_engine.device_steps import NotedSteps, device_numbers, noted
from lockstep.launcher.bench_engine.engines import WARM_UP_SEED, Opened, opened, say
from lockstep.launcher.bench_engine.numbers import ms_of_each, spread
from lockstep.launcher.bench_prefill.chunk_steps import chunk_steps
from lockstep.launcher.bench_prefill.numbers import PrefillRow, PrefillRun
from lockstep.launcher.bench_prefill.options import PrefillCommand
from lockstep.launcher.resolve import Resolved
from lockstep.worker.models.arithmetic import ChunkFlops, chunk_flops
from lockstep.worker.models.footprint import Footprint

Span = tuple[int, int]


@dataclass
class Times:
    """Of all repetitions, by chunks of the shorter and of the longer prompt."""

    chunk_ms: dict[Span, list[float]] = field(default_factory=lambda: defaultdict(list))
    device: dict[Span, list[NotedSteps]] = field(default_factory=lambda: defaultdict(list))


def measure_all(command: PrefillCommand, flops_per_s: float) -> list[PrefillRun]:
    """Every launcher in every graph mode.

    Raises:
        LaunchError: an engine cannot start, or dies.
    """
    return [_run(command, *start, flops_per_s) for start in command.options.starts]


def _run(command: PrefillCommand, launcher: str, mode: str, flops_per_s: float) -> PrefillRun:
    options = command.options
    longest = options.num_chunks[-1] * command.chunk_size
    with opened(command.launch(mode), launcher, input_len=longest) as engine:
        times, seeds = Times(), count(WARM_UP_SEED + 1)
        for repetition in range(1, options.repetitions + 1):
            _repeat(engine, command, times, seeds)
            latest = ", ".join(f"{times.chunk_ms[span][-1]:.3f}" for span in options.spans)
            say(f"{repetition} of {options.repetitions}: {latest} ms a chunk")
    rows = [_row(engine.resolved, command, span, times, flops_per_s) for span in options.spans]
    return engine.run(rows)


def _repeat(engine: Opened, command: PrefillCommand, times: Times, seeds: "count[int]") -> None:
    """Each prompt once, no two of them alike."""
    num_chunks = command.options.num_chunks
    seconds = {num_chunks[0]: _seconds(engine, num_chunks[0] * command.chunk_size, next(seeds))}
    for span in command.options.spans:
        shorter, longer = span
        pick = partial(chunk_steps, first=shorter, num_chunks=longer)
        with noted(engine.front, pick, times.device[span]):
            seconds[longer] = _seconds(engine, longer * command.chunk_size, next(seeds))
        more = ms_of_each(seconds[shorter], seconds[longer], longer - shorter)
        times.chunk_ms[span].append(more)


def _seconds(engine: Opened, input_len: int, seed: int) -> float:
    """Of one such prompt on every replica, to its first token."""
    num_reqs = engine.resolved.worker.parallel.dp_size
    return engine.load.seconds(engine.load.prompts(num_reqs, input_len, seed=seed), 1)


def _row(
    resolved: Resolved, command: PrefillCommand, span: Span, times: Times, flops_per_s: float
) -> PrefillRow:
    shorter, longer = (each * command.chunk_size for each in span)
    parallel = resolved.worker.parallel
    footprint = Footprint(resolved.worker.model, parallel.tp_size)
    flops = _of_each(chunk_flops(footprint, longer - shorter, shorter), span[1] - span[0])
    chunk_ms = spread(times.chunk_ms[span])
    reached = flops.total / chunk_ms.median * 1e3
    return PrefillRow(
        from_len=shorter,
        to_len=longer,
        chunk_ms=chunk_ms,
        tokens_per_s=parallel.dp_size * command.chunk_size / chunk_ms.median * 1e3,
        flops=flops,
        flops_per_s=reached,
        share=reached / flops_per_s,
        linear_ms=flops.linear / flops_per_s * 1e3,
        device=device_numbers(times.device[span]),
    )


def _of_each(flops: ChunkFlops, num_chunks: int) -> ChunkFlops:
    return ChunkFlops(flops.linear / num_chunks, flops.attention / num_chunks)
