"""Latencies of runs as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.launcher.bench.records import RequestRecord
from lockstep.launcher.bench.saved import Run
from lockstep.launcher.pictures import new_figure

_INCHES = (12.0, 4.0)


def plot_runs(runs: Sequence[Run], path: Path) -> None:
    """Draw what share of requests (of gaps, for ITL) took at most so long, a line a run.

    Raises:
        ValueError: matplotlib is missing, or the file's ending is not .png.
    """
    figure = new_figure(path, _INCHES)
    panels = figure.subplots(1, 3, sharey=True)
    panels[0].set_ylabel("share")
    for axes, name in zip(panels, ("TTFT", "TPOT", "ITL"), strict=True):
        for run in runs:
            millis = np.sort(_seconds(run.requests, name)) * 1000.0
            axes.plot(millis, np.linspace(0.0, 1.0, len(millis)), linewidth=1.0, label=run.label)
        axes.set_xlabel(f"{name}, ms")
    panels[-1].legend()
    figure.savefig(path)


def _seconds(records: Sequence[RequestRecord], name: str) -> list[float]:
    done = [record for record in records if not record.error]
    if name == "TTFT":
        return [record.ttft_s for record in done]
    if name == "TPOT":
        return [record.tpot_s for record in done if record.tpot_s is not None]
    return [gap for record in done for gap in record.itl_s]
