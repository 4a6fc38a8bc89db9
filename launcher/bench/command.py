"""The command lines of ``lockstep bench`` and of ``lockstep bench serve``."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from msgspec import structs

from lockstep.launcher.arguments import Parser
from lockstep.launcher.bench.options import BenchOptions, read_options
from lockstep.launcher.bench.plot import plot_runs
from lockstep.launcher.bench.saved import Run, load_run, save_run
from lockstep.launcher.bench.text import failures, run_table
from lockstep.launcher.consoles import open_console
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.files import check_writable
from lockstep.launcher.flags import with_flags
from lockstep.launcher.pictures import check_picture

KEY_VARIABLE = "OPENAI_API_KEY"


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a request failed, or an answer is wrong.

    Raises:
        ConfigError: one line that names flag, value and limit.
        LaunchError: there is no server to measure, or no engine.
    """
    parser = Parser(prog="lockstep bench", description="Measure a server, or a step of an engine.")
    parser.add_argument(
        "what", choices=list(_BENCHES), metavar=f"{{{','.join(_BENCHES)}}}",
        help="see 'lockstep bench WHAT --help'",
    )  # fmt: skip
    what: str = parser.parse_args(argv[:1]).what
    return _BENCHES[what](argv[1:])


def bench_serve(argv: Sequence[str]) -> int:
    """See ``main``."""
    try:
        options = read_options(argv)
        _check_files(options)
        runs = _runs(options)
        if options.plot is not None:
            plot_runs(runs, Path(options.plot))
    except ValueError as error:
        raise ConfigError(" ".join(with_flags(str(error), BenchOptions).split())) from None
    open_console().print(run_table(runs))
    return _report_failures(runs)


def output_paths(options: BenchOptions, labels: Sequence[str]) -> list[Path]:
    """Where each run is saved: a file a run, named after it if there are several."""
    if options.output is None:
        return []
    path = Path(options.output)
    if len(labels) == 1:
        return [path]
    return [path.with_name(f"{path.stem}.{label}{path.suffix}") for label in labels]


def _check_files(options: BenchOptions) -> None:
    for flag, name in (("--output", options.output), ("--plot", options.plot)):
        if name is not None:
            check_writable(flag, Path(name))
    if options.plot is not None:
        check_picture(Path(options.plot))


def _runs(options: BenchOptions) -> list[Run]:
    if options.compare:
        return [load_run(Path(name)) for name in options.compare]
    if find_spec("aiohttp") is None:
        raise ConfigError("bench needs aiohttp: pip install 'lockstep-decode[bench]'")
    runs = _measure(_with_key(options))
    paths = output_paths(options, [run.label for run in runs])
    for run, path in zip(runs, paths, strict=False):
        save_run(run, path)
    return runs


def _measure(options: BenchOptions) -> list[Run]:
    from lockstep.launcher.bench.load import run_load
    from lockstep.launcher.bench.modes import run_modes

    if options.modes is not None:
        return run_modes(options)
    return [run_load(options, Path(options.output).stem if options.output else "run")]


def _with_key(options: BenchOptions) -> BenchOptions:
    key = options.api_key or os.environ.get(KEY_VARIABLE)
    return structs.replace(options, api_key=key)


def bench_decode(argv: Sequence[str]) -> int:
    """See ``bench_decode.command.main``, which loads torch."""
    from lockstep.launcher.bench_decode.command import main

    return main(argv)


def bench_prefill(argv: Sequence[str]) -> int:
    """See ``bench_prefill.command.main``, which loads torch."""
    from lockstep.launcher.bench_prefill.command import main

    return main(argv)


_BENCHES = {"serve": bench_serve, "decode": bench_decode, "prefill": bench_prefill}


def _report_failures(runs: Sequence[Run]) -> int:
    lines = [f"lockstep: {run.label}: {text}\n" for run in runs for text in failures(run)]
    sys.stderr.writelines(lines)
    return 1 if lines else 0
