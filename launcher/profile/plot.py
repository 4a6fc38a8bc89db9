"""The timelines of profiled steps as a picture."""

from pathlib import Path
from typing import Any

from lockstep.launcher.pictures import new_figure
from lockstep.launcher.profile.report import BatchProfile, ProfileReport, StepProfile

_WIDTH, _HEIGHT_EACH = 14.0, 2.6
_OTHER = "other"


def plot_timelines(report: ProfileReport, path: Path) -> None:
    """Draw what runs when on the device, a row a batch.

    On the left the step without and with graphs on one clock, on the right the one with graphs
    alone, a line a role.

    Raises:
        ValueError: matplotlib is missing, or the file's ending is not .png.
    """
    figure = new_figure(path, (_WIDTH, _HEIGHT_EACH * len(report.batches)))
    panels = figure.subplots(len(report.batches), 2, squeeze=False)
    for (left, right), batch in zip(panels, report.batches, strict=True):
        _draw_both(left, batch)
        _draw_roles(right, batch.graphs or batch.eager)
    figure.suptitle(f"{report.model}, {report.dtype}, {report.machine.name}")
    figure.savefig(path)


def _draw_both(axes: Any, batch: BatchProfile) -> None:
    steps = [step for step in (batch.graphs, batch.eager) if step is not None]
    for line, step in enumerate(steps):
        _draw_line(axes, line, [(span.start_us, span.duration_us) for span in step.timeline])
    names = [f"{step.run_mode}\n{step.costs.step_us / 1e3:.3f} ms" for step in steps]
    _label(axes, names, f"batch {batch.eager.num_reqs}, without and with graphs")


def _draw_roles(axes: Any, step: StepProfile) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for span in step.timeline:
        lines.setdefault(span.role or _OTHER, []).append((span.start_us, span.duration_us))
    for line, spans in enumerate(lines.values()):
        _draw_line(axes, line, spans)
    _label(axes, list(lines), f"batch {step.num_reqs}, {step.run_mode} by role")


def _draw_line(axes: Any, line: int, spans: list[tuple[float, float]]) -> None:
    axes.broken_barh(spans, (line - 0.4, 0.8), color=f"C{line % 10}", linewidth=0)


def _label(axes: Any, names: list[str], title: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("us from the first operation", fontsize=7)
    axes.set_xlim(left=0)
    axes.set_title(title, fontsize=9)
