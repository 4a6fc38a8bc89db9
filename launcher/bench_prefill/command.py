"""The command line of ``lockstep bench prefill``."""

from collections.abc import Sequence

from lockstep.launcher.bench_engine.options import flag_error
from lockstep.launcher.bench_engine.report import setup_of, show
from lockstep.launcher.bench_prefill.numbers import PrefillReport
from lockstep.launcher.bench_prefill.options import PrefillCommand, PrefillOptions, parse
from lockstep.launcher.bench_prefill.probe import probe
from lockstep.launcher.bench_prefill.runs import measure_all
from lockstep.launcher.bench_prefill.text import heading, report_table
from lockstep.launcher.resolve import resolve


def main(argv: Sequence[str]) -> int:
    """Measure and print; returns 0.

    Raises:
        ConfigError: one line that names flag, value and limit.
        LaunchError: an engine cannot start, or dies.
    """
    try:
        command = parse(argv)
    except ValueError as error:
        raise flag_error(error, PrefillOptions) from None
    report = measure(command)
    show(report, command.options.json, heading(report), report_table(report.runs))
    return 0


def measure(command: PrefillCommand) -> PrefillReport:
    """All that the command asks for; what is wrong with any of its engines comes first."""
    first, *_ = [resolve(command.launch(mode)) for mode in command.options.mode_names]
    found = probe(first.device, first.worker)
    return PrefillReport(
        setup=setup_of(first, found.name, command.options, command.engine),
        chunk_size=command.chunk_size,
        gemm=found.gemm,
        runs=measure_all(command, found.gemm.flops_per_s),
    )
