"""What ran as a graph and what did not: a table and a file, after a run."""

from pathlib import Path

import msgspec
from rich.table import Table

from lockstep.launcher.consoles import open_console
from lockstep.worker.schedule.stats import GraphUse, SchedulerStats


def print_graph_stats(stats: SchedulerStats) -> None:
    """A row for each graph that was replayed and for each reason to run eagerly, on stderr."""
    console = open_console(stderr=True)
    console.print(graph_table(stats.graph_uses))
    steps = sum(use.num_steps for use in stats.graph_uses)
    replayed = sum(use.num_steps for use in stats.graph_uses if not use.reason)
    console.print(f"{replayed} of {steps} steps replayed graphs ({_percent(replayed, steps)} %)")


def graph_table(uses: list[GraphUse]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run mode")
    for name in ("size", "query_len", "steps", "tokens", "padding", "%"):
        table.add_column(name, justify="right")
    table.add_column("why eager")
    groups = len({use.dp_rank for use in uses}) > 1
    if groups:
        table.add_column("dp", justify="right")
    for use in uses:
        table.add_row(*_cells(use), *([str(use.dp_rank)] if groups else []))
    return table


def write_batch_histogram(path: Path, batch_sizes: dict[int, int]) -> None:
    """``{num_tokens: steps}`` as JSON: what ``lockstep plan --histogram`` reads."""
    data = msgspec.json.encode(batch_sizes)
    path.write_bytes(msgspec.json.format(data) + b"\n")


def _cells(use: GraphUse) -> list[str]:
    computed = use.num_tokens + use.num_padding_tokens
    numbers = (use.num_steps, use.num_tokens, use.num_padding_tokens)
    return [
        use.run_mode,
        "own" if use.num_tokens_padded is None else str(use.num_tokens_padded),
        str(use.uniform_query_len or "mixed"),
        *map(str, numbers),
        _percent(use.num_padding_tokens, computed),
        use.reason,
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.2f}"
