"""Waste over all batches as a picture."""

from collections.abc import Iterable
from pathlib import Path

from lockstep.launcher.pictures import new_figure
from lockstep.worker.graphs.dispatch import Dispatcher
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.graphs.padding import Batch, decode_batches, mixed_batches, pad

_INCHES = (9.0, 4.0)


def plot_waste(dispatcher: Dispatcher, path: Path) -> None:
    """Draw the share of padding of every decode and every mixed batch that has a graph.

    Raises:
        ValueError: matplotlib is missing, or the file's ending is not .png.
    """
    figure = new_figure(path, _INCHES)
    axes = figure.subplots()
    for kind, batches in (("mixed", mixed_batches), ("decode", decode_batches)):
        tokens, percents = _points(dispatcher, batches(dispatcher.grid))
        axes.plot(tokens, percents, drawstyle="steps-mid", linewidth=1.0, label=f"{kind} batches")
    axes.set_title(f"{dispatcher.mode}, {len(dispatcher.grid.capture_sizes)} sizes")
    axes.set_xlabel("tokens of the batch")
    axes.set_ylabel("padding, % of what is computed")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def _points(dispatcher: Dispatcher, batches: Iterable[Batch]) -> tuple[list[int], list[float]]:
    padded = [pad(dispatcher, batch) for batch in batches]
    served = [each for each in padded if each.run_mode is not RunMode.EAGER]
    return [each.batch.num_tokens for each in served], [each.waste_percent for each in served]
