"""Which captured graph serves a batch (pure, no torch)."""

from bisect import bisect_left
from collections.abc import Collection

import msgspec
from msgspec import structs

from lockstep.worker.config import GraphConfig, ScheduleConfig
from lockstep.worker.graphs.grid import Grid, build_grid, empty_grid
from lockstep.worker.graphs.mode import GraphMode, RunMode


class BatchDescriptor(msgspec.Struct, frozen=True):
    """Key of a graph.

    ``num_reqs`` is None where any number fits (PIECEWISE). ``uniform_query_len`` is the tokens of
    every request of a decode batch, 0 for a mixed batch.
    """

    num_tokens: int
    num_reqs: int | None
    uniform_query_len: int
    num_active_loras: int = 0


class Dispatcher:
    """Maps a batch to the best run mode and the padded descriptor of its graph.

    Args:
        grid: the captured sizes.
        mode: a mode that can run here (see ``resolve_mode``).
        lora_cases: counts of active adapters that have graphs of their own, ascending.
    """

    def __init__(self, grid: Grid, mode: GraphMode, lora_cases: tuple[int, ...] = (0,)) -> None:
        if not lora_cases or list(lora_cases) != sorted({*lora_cases}) or lora_cases[0] < 0:
            raise ValueError(f"lora_cases must ascend from at least 0, got {lora_cases}")
        self.grid = grid
        self.mode = mode
        self.lora_cases = lora_cases

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know about the grid, with the decode range that has no FULL graph."""
        gap = self.grid.uncovered_decode
        if self.mode.decode is not RunMode.FULL or gap is None:
            return self.grid.warnings
        sizes = " to ".join(map(str, sorted(set(gap))))
        return (*self.grid.warnings, f"decode batches of {sizes} tokens have no FULL decode graph")

    def descriptors(self, run_mode: RunMode) -> list[BatchDescriptor]:
        """All graphs of a run mode, largest first; of one size, mixed before decode."""
        found = list[BatchDescriptor]()
        if run_mode is not RunMode.EAGER and self.mode.mixed is run_mode:
            found += [self._mixed(run_mode, size, 0) for size in self.grid.capture_sizes]
        if self.mode.decode is run_mode is RunMode.FULL:
            found += [self._decode(size, 0) for size in self.grid.decode_sizes]
        cases = [
            structs.replace(each, num_active_loras=case)
            for each in found
            for case in self.lora_cases
        ]
        return sorted(cases, key=lambda each: (-each.num_tokens, -each.num_active_loras))

    def only(self, captured: Collection[BatchDescriptor]) -> "Dispatcher":
        """This dispatcher while only these graphs exist: batches go to the next larger of them."""
        missing = {
            (each.num_tokens, each.uniform_query_len > 0)
            for run_mode in (RunMode.PIECEWISE, RunMode.FULL)
            for each in self.descriptors(run_mode)
            if each not in captured
        }
        sizes = self.grid.capture_sizes, self.grid.decode_sizes
        mixed, decode = (
            tuple(size for size in kind if (size, is_decode) not in missing)
            for is_decode, kind in enumerate(sizes)
        )
        grid = structs.replace(self.grid, capture_sizes=mixed, decode_sizes=decode)
        return Dispatcher(grid, self.mode, self.lora_cases)

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int,
        uniform_query_len: int,
        num_active_loras: int = 0,
        max_mode: int = RunMode.FULL,
    ) -> tuple[RunMode, BatchDescriptor]:
        """Best run mode of at most ``max_mode``, and the descriptor padded for it.

        Without a graph that holds the batch: EAGER and the batch's own counts.
        """
        for run_mode in (RunMode.FULL, RunMode.PIECEWISE):
            if run_mode > max_mode:
                continue
            found = self._find(run_mode, num_tokens, num_reqs, uniform_query_len, num_active_loras)
            if found is not None:
                return run_mode, found
        own = BatchDescriptor(num_tokens, num_reqs, uniform_query_len, num_active_loras)
        return RunMode.EAGER, own

    def _find(
        self, run_mode: RunMode, tokens: int, reqs: int, query_len: int, loras: int
    ) -> BatchDescriptor | None:
        case = self._lora_case(loras)
        if case is None:
            return None
        if self.mode.decode is run_mode is RunMode.FULL and query_len == self.grid.query_len:
            size = _next(self.grid.decode_sizes, tokens)
            if size is not None:
                return self._decode(size, case)
        size = _next(self.grid.capture_sizes, tokens)
        if self.mode.mixed is not run_mode or size is None:
            return None
        found = self._mixed(run_mode, size, case)
        return found if found.num_reqs is None or reqs <= found.num_reqs else None

    def _lora_case(self, active: int) -> int | None:
        """Least captured case that holds ``active``; the largest holds whatever is above it."""
        at = min(bisect_left(self.lora_cases, active), len(self.lora_cases) - 1)
        case = self.lora_cases[at]
        return None if active and not case else case

    def _decode(self, size: int, case: int) -> BatchDescriptor:
        query_len = self.grid.query_len
        return BatchDescriptor(size, size // query_len, query_len, case)

    def _mixed(self, run_mode: RunMode, size: int, case: int) -> BatchDescriptor:
        fits = min(size, self.grid.max_num_seqs) if run_mode is RunMode.FULL else None
        return BatchDescriptor(size, fits, 0, case)


def create_dispatcher(
    graph: GraphConfig, schedule: ScheduleConfig, query_len: int = 1
) -> Dispatcher:
    """The dispatcher of a running system: the scheduler and every rank build the same one.

    ``graph.mode`` is taken as it is: what attention can do was asked when it was resolved.
    """
    mode = GraphMode(graph.mode)
    limits = {
        "max_num_seqs": schedule.max_num_seqs,
        "max_num_batched_tokens": schedule.max_num_batched_tokens,
        "query_len": query_len,
    }
    if mode is GraphMode.NONE:
        return Dispatcher(empty_grid(**limits), mode)
    grid = build_grid(
        **limits,
        capture_sizes=graph.capture_sizes,
        max_capture_size=graph.max_capture_size,
        compute_capability=graph.compute_capability,
        performance_mode=graph.performance_mode,
    )
    return Dispatcher(grid, mode)


def _next(sizes: tuple[int, ...], wanted: int) -> int | None:
    at = bisect_left(sizes, wanted)
    return sizes[at] if at < len(sizes) else None
