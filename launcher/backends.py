"""``lockstep backends``: attention backends, what each can do in a graph, which run here."""

from collections.abc import Sequence

from rich.table import Table

from lockstep.launcher.arguments import Parser
from lockstep.launcher.consoles import open_console
from lockstep.worker.attention.registry import BACKENDS, BackendInfo

SUMMARY = "list attention backends and what they can do in a graph"


def main(argv: Sequence[str]) -> int:
    Parser(prog="lockstep backends", description=SUMMARY).parse_args(argv)
    open_console().print(backend_table())
    return 0


def backend_table() -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("backend", no_wrap=True)
    table.add_column("support in a graph", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("why")
    for info in BACKENDS:
        table.add_row(info.name, info.support.name, _here(info), info.why)
    return table


def _here(info: BackendInfo) -> str:
    if not info.adapter:
        return "no"
    return f"needs {info.missing}" if info.missing else "yes"
