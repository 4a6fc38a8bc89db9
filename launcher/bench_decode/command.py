"""The command line of ``lockstep bench decode``."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from msgspec import structs

from lockstep.launcher.bench_decode import apart
from lockstep.launcher.bench_decode.numbers import DecodeReport
from lockstep.launcher.bench_decode.options import DecodeCommand, DecodeOptions, parse
from lockstep.launcher.bench_decode.runs import measure_all
from lockstep.launcher.bench_decode.text import heading, report_table
from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.consoles import open_console
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.flags import with_flags
from lockstep.launcher.resolve import resolve

_PACKAGES = ("lockstep-decode", "torch", "triton", "ray")


def main(argv: Sequence[str]) -> int:
    """Returns 1 if an answer differs from its model.

    Raises:
        ConfigError: one line that names flag, value and limit.
        LaunchError: an engine cannot start, or dies.
    """
    try:
        command = parse(argv)
    except ValueError as error:
        named = with_flags(with_flags(str(error), DecodeOptions), LaunchConfig)
        raise ConfigError(" ".join(named.split())) from None
    report = measure(command)
    if command.options.json is not None:
        Path(command.options.json).write_bytes(msgspec.json.encode(report) + b"\n")
    console = open_console()
    for line in heading(report):
        console.print(line)
    console.print(report_table(report.runs))
    return 0 if report.passed else 1


def measure(command: DecodeCommand) -> DecodeReport:
    """All that the command asks for; what is wrong with any of its engines comes first."""
    first, *_ = [resolve(command.launch(mode)) for mode in command.options.mode_names]
    found = apart.probe(first.device)
    parallel = first.worker.parallel
    return DecodeReport(
        model=Path(first.launch.model).name,
        dtype=first.worker.dtype,
        device=found.name,
        versions=_versions(),
        tensor_parallel_size=parallel.tp_size,
        data_parallel_size=parallel.dp_size,
        options=structs.asdict(command.options),
        engine=command.engine,
        ceiling=found.ceiling,
        runs=measure_all(command, found.ceiling.bytes_per_s),
    )


def _versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = dict[str, str]()
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
