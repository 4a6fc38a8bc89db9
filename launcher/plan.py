"""``lockstep plan``: which graphs a configuration captures, without a GPU and without looking."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lockstep.launcher.consoles import open_console
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.files import check_writable
from lockstep.launcher.flags import with_flags
from lockstep.launcher.plan_graphs import agreement_of, plan_graphs
from lockstep.launcher.plan_options import PlanOptions, read_options
from lockstep.launcher.plan_plot import plot_waste
from lockstep.launcher.plan_report import make_report
from lockstep.launcher.plan_text import print_plan


def main(argv: Sequence[str]) -> int:
    """Print the plan.

    Raises:
        ConfigError: one line that names flag, value and limit.
    """
    try:
        _show(read_options(argv))
    except ValueError as error:
        raise ConfigError(" ".join(with_flags(str(error), PlanOptions).split())) from None
    return 0


def _show(options: PlanOptions) -> None:
    planned = plan_graphs(options)
    if options.agree is not None:
        _write_json(agreement_of(options.agree, planned.dispatcher))
        return
    report = make_report(options, planned)
    if options.plot is not None:
        check_writable("--plot", Path(options.plot))
        plot_waste(planned.dispatcher, Path(options.plot))
    if options.json:
        _write_json(report)
    else:
        print_plan(open_console(), report, planned)


def _write_json(found: msgspec.Struct) -> None:
    text = msgspec.json.format(msgspec.json.encode(found), indent=0).decode()
    sys.stdout.write(f"{text}\n")
