"""The command line of ``lockstep bench decode``."""

from collections.abc import Sequence

from lockstep.launcher.bench_decode import apart
from lockstep.launcher.bench_decode.numbers import DecodeReport
from lockstep.launcher.bench_decode.options import DecodeCommand, DecodeOptions, parse
from lockstep.launcher.bench_decode.runs import measure_all
from lockstep.launcher.bench_decode.text import heading, report_table
from lockstep.launcher.bench_engine.options import flag_error
from lockstep.launcher.bench_engine.report import setup_of, show
from lockstep.launcher.resolve import resolve


def main(argv: Sequence[str]) -> int:
    """Returns 1 if an answer differs from its model.

    Raises:
        ConfigError: one line that names flag, value and limit.
        LaunchError: an engine cannot start, or dies.
    """
    try:
        command = parse(argv)
    except ValueError as error:
        raise flag_error(error, DecodeOptions) from None
    report = measure(command)
    show(report, command.options.json, heading(report), report_table(report.runs))
    return 0 if report.passed else 1


def measure(command: DecodeCommand) -> DecodeReport:
    """All that the command asks for; what is wrong with any of its engines comes first."""
    first, *_ = [resolve(command.launch(mode)) for mode in command.options.mode_names]
    found = apart.probe(first.device)
    return DecodeReport(
        setup=setup_of(first, found.name, command.options, command.engine),
        ceiling=found.ceiling,
        runs=measure_all(command, found.ceiling.bytes_per_s),
    )
