"""A profile for people: sentences and tables."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from lockstep.launcher.profile.bound import compare
from lockstep.launcher.profile.kernels import Kernel
from lockstep.launcher.profile.report import BatchProfile, ProfileReport, StepProfile

_UNKNOWN = "-"


def print_report(console: Console, report: ProfileReport, rows: int) -> None:
    """Each batch with its bounds and its ``rows`` longest kernels, then all batches in a table."""
    machine, size = report.machine, report.tensor_parallel_size
    split = f"rank 0 of {size}, " if size > 1 else ""
    console.print(
        f"{report.model}, {report.dtype}, {split}on {machine.name}: memory is read at "
        f"{machine.ceiling_bytes_per_s / 1e9:.1f} GB/s at best, a launch takes the host "
        f"{machine.launch_us:.2f} us",
        soft_wrap=True,
    )
    for batch in report.batches:
        console.print()
        for line in _sentences(batch):
            console.print(line, soft_wrap=True)
        console.print()
        console.print(_kernel_table(batch.graphs or batch.eager, rows))
    console.print()
    console.print(_step_table(report.batches))


def _sentences(batch: BatchProfile) -> Iterator[str]:
    eager, graphs = batch.eager, batch.graphs
    yield f"batch {eager.num_reqs}, context {eager.context_len}"
    yield f"  without graphs  {eager.explanation}"
    if graphs is None:
        yield "  with graphs     no graph serves this batch"
        return
    yield f"  with graphs     {graphs.explanation}"
    # On a CPU a graph is the same calls again.
    if graphs.costs.num_submissions < eager.costs.num_submissions:
        yield f"                  {compare(eager.costs, graphs.costs)}"


def _step_table(batches: Sequence[BatchProfile]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("batch", justify="right")
    table.add_column("run as")
    for title in ("operations", "launches", "launches ms", "device ms", "host ms", "step ms"):
        table.add_column(title, justify="right")
    table.add_column("floor %", justify="right")
    table.add_column("bound")
    for batch in batches:
        for step in (batch.eager, batch.graphs):
            if step is not None:
                table.add_row(*_step_cells(step))
    return table


def _step_cells(step: StepProfile) -> list[str]:
    costs = step.costs
    padded = f" of {step.num_tokens}" if step.num_tokens != step.num_reqs else ""
    times = (costs.launches_us, costs.device_us, costs.host_us, costs.step_us)
    return [
        str(step.num_reqs),
        step.run_mode + padded,
        str(costs.num_operations),
        str(costs.num_submissions),
        *(f"{each / 1e3:.3f}" for each in times),
        f"{100 * step.floor_us / costs.step_us:.1f}",
        step.bound,
    ]


def _kernel_table(step: StepProfile, rows: int) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(f"kernel ({step.run_mode})", max_width=64, no_wrap=True)
    table.add_column("role")
    for title in ("calls", "us", "us a call", "% of step", "MB", "% of ceiling"):
        table.add_column(title, justify="right")
    total_us = step.costs.device_us
    for kernel in step.kernels[:rows]:
        table.add_row(*_kernel_cells(kernel, total_us))
    rest = step.kernels[rows:]
    if rest:
        calls, time_us = sum(k.calls for k in rest), sum(k.time_us for k in rest)
        share = f"{100 * time_us / total_us:.1f}"
        table.add_row(f"{len(rest)} others", _UNKNOWN, str(calls), f"{time_us:.1f}", "", share)
    return table


def _kernel_cells(kernel: Kernel, total_us: float) -> list[str]:
    share = kernel.ceiling_share
    return [
        kernel.name,
        kernel.role or _UNKNOWN,
        str(kernel.calls),
        f"{kernel.time_us:.1f}",
        f"{kernel.time_us / kernel.calls:.2f}",
        f"{100 * kernel.time_us / total_us:.1f}",
        _UNKNOWN if kernel.num_bytes is None else f"{kernel.num_bytes / 1e6:.3f}",
        _UNKNOWN if share is None else f"{100 * share:.1f}",
    ]
