"""Captures the graphs of a manifest on all ranks alike, and replays them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.comm.errors import CommError
from lockstep.comm.ledger import compare_ledgers
from lockstep.comm.messages import GraphCost
from lockstep.parallel.topology import Topology
from lockstep.worker.graphs.agreement import compare_manifests
from lockstep.worker.graphs.backend import Captured, CaptureSession, GraphBackend
from lockstep.worker.graphs.dispatch import BatchDescriptor
from lockstep.worker.graphs.errors import CaptureFailed, GraphError
from lockstep.worker.graphs.manifest import Manifest
from lockstep.worker.graphs.statics import AddressBook, StaticState

Parts = Mapping[str, Callable[[], None]]
Build = Callable[[BatchDescriptor], Parts]
Progress = Callable[[int, int], None]

# Ranks that differ must all have said so and be gone within 30 seconds.
_DEADLINE_S = 20.0


@dataclass(slots=True)
class GraphRecord:
    """One descriptor's graphs: parts by name, what they cost and hold, how often each replayed."""

    parts: dict[str, Captured]
    seconds: float
    num_bytes: int
    num_operations: int
    num_replays: dict[str, int]

    def replay(self, part: str) -> None:
        self.parts[part].replay()
        self.num_replays[part] += 1


class GraphRunner:
    """Owner of all graphs of a rank; they are captured once, in the manifest's order."""

    def __init__(self, backend: GraphBackend, topology: Topology) -> None:
        self._backend = backend
        self._topology = topology
        self._records: dict[BatchDescriptor, GraphRecord] = {}
        self._book: AddressBook | None = None
        self._build: Build | None = None
        self._order: list[BatchDescriptor] = []

    @property
    def records(self) -> Mapping[BatchDescriptor, GraphRecord]:
        return self._records

    def capture_all(
        self,
        manifest: Manifest,
        build: Build,
        state: StaticState,
        progress: Progress | None = None,
    ) -> None:
        """Warm up and capture every early entry, all ranks of the lockstep group together.

        Late entries wait for ``capture_next``.

        Args:
            build: gives the named parts of a descriptor; each reads and writes only ``state``.
            progress: called with (done, total), each graph counting for warm-up and for capture.

        Raises:
            GraphError: there are graphs already; release them first, as a set.
            RankMismatch: ranks differ in manifest or communication; raised on all of them.
            CaptureFailed: a part raised; names the descriptor, its error is the cause.
        """
        if self._records:
            raise GraphError("graphs are captured once: release them all before capturing again")
        compare_manifests(manifest, self._topology.lockstep)
        book = AddressBook(state)
        early = [entry.descriptor for entry in manifest.early]
        self._records = self._capture_each(_Work(early, build, progress))
        self._book, self._build = book, build
        self._order = [entry.descriptor for entry in manifest.entries]

    def capture_next(self, position: int) -> BatchDescriptor:
        """Capture the late entry at this place of the manifest, all ranks together; returns it.

        Raises:
            GraphError: it is not the next one: no plan that was followed orders it.
            StaleGraphError: a static tensor has moved.
            RankMismatch, CaptureFailed: as ``capture_all``.
        """
        if self._build is None or self._book is None or position != len(self._records):
            raise GraphError(
                f"graph {position} is not captured: {len(self._records)} of {len(self._order)} "
                "exist, and captures follow the manifest"
            )
        if position >= len(self._order):
            raise GraphError(f"graph {position} is not captured: the manifest has {position}")
        self._book.check()
        descriptor = self._order[position]
        self._records |= self._capture_each(_Work([descriptor], self._build, None))
        return descriptor

    def _capture_each(self, work: "_Work") -> dict[BatchDescriptor, GraphRecord]:
        with self._backend.session() as session:
            for descriptor in work:
                with self._reporting(descriptor):
                    self._warm_up(session, descriptor, work.parts(descriptor))
            # A watchdog that polls events of eager work breaks a capture: all work is done and
            # forgotten before the first, and nothing runs eagerly until the last.
            session.idle()
            self._topology.retire()
            return {key: self._capture(session, key, work.parts(key)) for key in work}

    def costs(self) -> list[GraphCost]:
        """What each descriptor took, in the order of capture."""
        return [
            GraphCost(
                key.num_tokens,
                key.uniform_query_len,
                record.seconds,
                record.num_bytes,
                len(record.parts),
            )
            for key, record in self._records.items()
        ]

    def captured(self, descriptor: BatchDescriptor, part: str) -> bool:
        record = self._records.get(descriptor)
        return record is not None and part in record.parts

    def replay(self, descriptor: BatchDescriptor, part: str) -> None:
        """Launch one part. Never captures.

        Raises:
            StaleGraphError: a static tensor has moved; names it.
            GraphError: no plan ordered this graph.
        """
        self._checked(descriptor, part).replay(part)

    def replay_in_turn(
        self, descriptor: BatchDescriptor, parts: Sequence[str], between: Callable[[int], None]
    ) -> None:
        """Launch parts in order and call ``between(i)`` after all but the last; checks once.

        Raises:
            StaleGraphError, GraphError: as ``replay``.
        """
        record = self._checked(descriptor, *parts)
        *others, last = parts
        for index, part in enumerate(others):
            record.replay(part)
            between(index)
        record.replay(last)

    def release(self) -> None:
        """Drop all graphs. Comes before the topology is destroyed."""
        self._records.clear()
        self._book = self._build = None
        self._order = []
        self._backend.release()

    def _checked(self, descriptor: BatchDescriptor, *parts: str) -> GraphRecord:
        record = self._records.get(descriptor)
        made = record.parts if record else {}
        missing = [part for part in parts if part not in made]
        if record is None or missing or self._book is None:
            raise GraphError(
                f"{missing[0]} of {_name(descriptor)} was not captured, and is not now"
            )
        self._book.check()
        return record

    def _capture(
        self, session: CaptureSession, descriptor: BatchDescriptor, parts: Parts
    ) -> GraphRecord:
        # No rank may record while a peer still has to launch what is recorded here.
        self._topology.lockstep.barrier(_DEADLINE_S)
        started, before = time.perf_counter(), session.used_bytes()
        with self._reporting(descriptor), self._topology.ledger.recorded() as ledger:
            captured = {part: session.capture(fn) for part, fn in parts.items()}
        seconds, num_bytes = time.perf_counter() - started, session.used_bytes() - before
        compare_ledgers(ledger, self._topology.lockstep, _name(descriptor), _DEADLINE_S)
        return GraphRecord(captured, seconds, num_bytes, len(ledger), dict.fromkeys(captured, 0))

    def _warm_up(self, session: CaptureSession, descriptor: BatchDescriptor, parts: Parts) -> None:
        """Once eagerly, each operation compared over ranks before it can block any of them."""
        topology = self._topology
        for part, fn in parts.items():
            with topology.ledger.compared_before_launch(
                topology.lockstep, f"{_name(descriptor)}, {part}", _DEADLINE_S
            ):
                session.warm_up(fn)

    @contextmanager
    def _reporting(self, descriptor: BatchDescriptor) -> Iterator[None]:
        """Turn what a part raises into CaptureFailed, and tell the peers without a collective."""
        try:
            yield
        except CommError:
            raise
        except Exception as error:
            self._topology.give_up(error)
            name = type(error).__name__
            raise CaptureFailed(f"at {_name(descriptor)}: {name}: {error}") from error


class _Work:
    """The descriptors in order, gone through twice: for warm-up and for capture."""

    def __init__(
        self, descriptors: list[BatchDescriptor], build: Build, progress: Progress | None
    ) -> None:
        self._descriptors = descriptors
        self._build = build
        self._progress = progress
        self._parts: dict[BatchDescriptor, Parts] = {}
        self._num_done = 0

    def __iter__(self) -> Iterator[BatchDescriptor]:
        for descriptor in self._descriptors:
            if self._progress is not None:
                self._progress(self._num_done, 2 * len(self._descriptors))
            self._num_done += 1
            yield descriptor

    def parts(self, descriptor: BatchDescriptor) -> Parts:
        if descriptor not in self._parts:
            self._parts[descriptor] = self._build(descriptor)
        return self._parts[descriptor]


def _name(descriptor: BatchDescriptor) -> str:
    if descriptor.num_reqs is None:
        return f"size {descriptor.num_tokens} in segments"
    kind = "" if descriptor.uniform_query_len else " of any batch"
    return f"size {descriptor.num_tokens}{kind}"
