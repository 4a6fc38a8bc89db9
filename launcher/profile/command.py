"""``lockstep profile``: what bounds a decode step here, as text, JSON and a picture."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.consoles import open_console
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.files import check_writable
from lockstep.launcher.flags import with_flags
from lockstep.launcher.pictures import check_picture
from lockstep.launcher.profile.options import ProfileOptions, read_options
from lockstep.launcher.profile.plot import plot_timelines
from lockstep.launcher.profile.report import ProfileReport
from lockstep.launcher.profile.text import print_report
from lockstep.launcher.progress import stages


def main(argv: Sequence[str]) -> int:
    """Profile and print.

    Raises:
        ConfigError: one line that names flag, value and limit.
    """
    try:
        options, config = read_options(argv)
        _check_files(options)
        report = _measure(options, config)
    except ValueError as error:
        raise ConfigError(" ".join(with_flags(str(error), ProfileOptions).split())) from None
    _write(report, options)
    print_report(open_console(), report, options.rows)
    return 0


def _measure(options: ProfileOptions, config: LaunchConfig) -> ProfileReport:
    # Lines of torch's profiler about itself, two a recorded step.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from lockstep.launcher.profile.measure import measure

    with stages() as progress:
        return measure(options, config, progress)


def _check_files(options: ProfileOptions) -> None:
    for flag, name in (("--json", options.json), ("--plot", options.plot)):
        if name is not None:
            check_writable(flag, Path(name))
    if options.plot is not None:
        check_picture(Path(options.plot))


def _write(report: ProfileReport, options: ProfileOptions) -> None:
    if options.json is not None:
        text = msgspec.json.format(msgspec.json.encode(report), indent=1)
        Path(options.json).write_bytes(text + b"\n")
    if options.plot is not None:
        plot_timelines(report, Path(options.plot))
