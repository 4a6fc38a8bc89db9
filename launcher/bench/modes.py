"""The same load on the same model in three graph modes, one server after the other."""

import shlex

from msgspec import structs

from lockstep.launcher.bench.load import run_load
from lockstep.launcher.bench.options import BenchOptions
from lockstep.launcher.bench.own_server import own_server
from lockstep.launcher.bench.saved import Run

MODES = {
    "eager": ("--enforce-eager",),
    "PIECEWISE": ("--cudagraph-mode", "PIECEWISE"),
    "FULL_AND_PIECEWISE": ("--cudagraph-mode", "FULL_AND_PIECEWISE"),
}


def run_modes(options: BenchOptions) -> list[Run]:
    """A run a mode, with equal prompts and arrivals; raises as ``own_server`` and ``run_load``."""
    runs = []
    for label, mode in MODES.items():
        argv = [str(options.modes), *mode, *shlex.split(options.serve_args or "")]
        with own_server(label, argv) as url:
            there = structs.replace(options, base_url=url, modes=None, serve_args=None)
            runs.append(run_load(there, label))
    return runs
