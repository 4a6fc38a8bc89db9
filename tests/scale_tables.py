"""The tables of a scale run, from what its parts have left."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scale_parts import Part

from lockstep.launcher.bench_decode.numbers import DecodeReport
from lockstep.launcher.bench_decode.text import gate_text

Lines = list[str]
_OUTCOME = re.compile(r"^(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)


@dataclass(frozen=True)
class Done:
    """What came of a part: its exit code (None: it was ended), its output, and its report."""

    part: Part
    code: int | None
    seconds: float
    output: str
    report: DecodeReport | None = None


class _Rate(NamedTuple):
    """``reqs`` on each GPU; tokens of all of them."""

    name: str
    model: str
    num_gpus: int
    reqs: int
    tokens_per_s: float


def tables(done: Sequence[Done]) -> Lines:
    """All of them, in the order of docs/performance.md."""
    decoded = [each for each in done if each.report is not None]
    return [
        *_titled("Parts", _parts(done)),
        *_titled("Tests", _tests(done)),
        *_titled("Sums over ranks", _sums(done)),
        *_titled("Decode steps", _steps(decoded)),
        *_titled("Throughput", _throughput(decoded)),
        *_titled("Seconds from the command to the first token", _starts(decoded)),
    ]


def _titled(title: str, lines: Lines) -> Lines:
    return ["", f"## {title}", "", *lines] if lines else []


def _parts(done: Sequence[Done]) -> Lines:
    rows = [[each.part.name, f"{each.seconds:.0f}", _ended(each)] for each in done]
    return markdown(["part", "seconds", "ended"], rows)


def _ended(done: Done) -> str:
    if done.code is None:
        return f"cut after {done.seconds:.0f} s" if done.seconds else "no time was left"
    return "ok" if done.code == 0 else f"exit code {done.code}"


def _sums(done: Sequence[Done]) -> Lines:
    return [line for each in done if each.part.name == "sums" for line in each.output.splitlines()]


def _tests(done: Sequence[Done]) -> Lines:
    rows, failed = [], Lines()
    for each in done:
        outcomes = _OUTCOME.findall(each.output)
        if outcomes:
            counts = [sum(word == of for _, of in outcomes) for word in ("PASSED", "SKIPPED")]
            wrong = [f"{of}: {name}" for name, of in outcomes if of in ("FAILED", "ERROR")]
            rows.append([each.part.name, *map(str, counts), str(len(wrong))])
            failed += wrong
    return [*markdown(["tests", "passed", "skipped", "failed"], rows), *failed]


def _steps(decoded: Sequence[Done]) -> Lines:
    titles = ["", "batch", "ms/step", "least to most", "device p50 ms", "p99 ms", "host p50 us"]
    titles += ["floor ms", "share", "gate"]
    return markdown(titles, [row for each in decoded for row in _step_rows(each)])


def _step_rows(done: Done) -> Iterator[Lines]:
    assert done.report is not None
    for row in done.report.runs[0].rows:
        step, device = row.step_ms, row.device
        noted = ["-"] * 3
        if device is not None:
            step_ms, host_us = device.step_ms, device.host_us
            noted = [f"{step_ms.p50:.3f}", f"{step_ms.p99:.3f}", f"{host_us.p50:.1f}"]
        yield [
            done.part.name, str(row.batch), f"{step.median:.3f}",
            f"{step.least:.3f}-{step.most:.3f}", *noted, f"{row.floor_ms:.3f}", f"{row.share:.1%}",
            gate_text(row.accuracy) if row.accuracy else "-",
        ]  # fmt: skip


def _throughput(decoded: Sequence[Done]) -> Lines:
    """Of the layouts that hold as many requests a GPU as one GPU alone."""
    rates = [rate for each in decoded for rate in _rates(each)]
    alone = {(rate.model, rate.reqs): rate.tokens_per_s for rate in rates if rate.num_gpus == 1}
    rows = [
        [rate.name, str(rate.reqs), f"{rate.tokens_per_s:.0f}", f"{rate.tokens_per_s / one:.2f}"]
        for rate in rates
        if (one := alone.get((rate.model, rate.reqs)))
    ]
    return markdown(["", "requests a GPU", "tok/s", "of one GPU"], rows)


def _rates(done: Done) -> Iterator[_Rate]:
    assert done.report is not None
    setup = done.report.setup
    tp, dp = setup.tensor_parallel_size, setup.data_parallel_size
    for row in done.report.runs[0].rows:
        if row.batch % tp == 0:
            yield _Rate(done.part.name, setup.model, tp * dp, row.batch // tp, row.tokens_per_s)


def _starts(decoded: Sequence[Done]) -> Lines:
    seconds = {each.part.name: each.report.runs[0].seconds for each in decoded if each.report}
    stages = list(dict.fromkeys(stage for each in seconds.values() for stage in each))
    graphs = {each.part.name: each.report.runs[0].num_graphs for each in decoded if each.report}
    rows = [
        [name, *(f"{each[stage]:.1f}" if stage in each else "-" for stage in stages),
         str(graphs[name])]
        for name, each in seconds.items()
    ]  # fmt: skip
    return markdown(["", *stages, "graphs"], rows)


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Lines:
    """Nothing at all without rows."""
    ruler = ["---"] * len(titles)
    return [f"| {' | '.join(cells)} |" for cells in [titles, ruler, *rows]] if rows else []
