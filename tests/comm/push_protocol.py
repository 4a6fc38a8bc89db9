"""Ranks that push rows to each other as ``PushBuffer`` says, in plain Python, a step at a time.

A program takes every so manyth row. Each line is a thread of its own, which writes that line of all
these rows before it waits for the first. What it writes to a peer flies, and lands in any order. A
rank begins a call once all threads of its last one have ended, as kernels on a stream do.
"""

import random
from collections.abc import Iterator, Sequence

LINES = 2
WRAP = 1 << 32


class Stuck(AssertionError):
    """All wait, and nothing flies that they could wait for."""


class Ranks:
    """Args:
    calls: number of rows of each call, the same on all ranks.
    first_epoch: how often each row has been summed before.
    speeds: how often each rank gets a step, and (last) how often something lands.
    programs: that each rank has in a call; left out, as many as rows.
    places: how many programs a rank runs at once, begun in any order; left out, all.
    """

    def __init__(
        self,
        calls: Sequence[int],
        speeds: Sequence[int],
        num_buffers: int,
        first_epoch: int = 0,
        programs: Sequence[int] = (),
        places: int | None = None,
    ) -> None:
        self.calls = calls
        self.speeds = list(speeds)
        self.world = len(speeds) - 1
        self.num_buffers = num_buffers
        self.first_epoch = first_epoch
        self.programs = programs or [max(calls)] * self.world
        self.places = places
        self.memory: list[dict[tuple[int, ...], tuple[int, int]]] = [{} for _ in range(self.world)]
        self.epochs = [[first_epoch] * max(calls) for _ in range(self.world)]
        self.flying: list[tuple[int, tuple[int, ...], tuple[int, int]]] = []
        self.results: list[list[tuple[int, ...]]] = [[] for _ in range(self.world)]
        self.idle = 0

    def run(self, seed: int) -> None:
        """Take steps until all calls have ended everywhere. Raises Stuck if they cannot."""
        draw = random.Random(seed)
        programs = [self._rank(rank, draw) for rank in range(self.world)]
        live = set(range(self.world))
        while live:
            turn = draw.choices(range(self.world + 1), self.speeds)[0]
            if turn == self.world:
                self._land(draw)
            elif turn in live and next(programs[turn], "ended") == "ended":
                live.remove(turn)
            if self.idle > 2000 and not self.flying:
                raise Stuck(f"ranks {sorted(live)} wait for ever")

    def _land(self, draw: random.Random) -> None:
        if self.flying:
            rank, place, line = self.flying.pop(draw.randrange(len(self.flying)))
            self.memory[rank][place] = line
            self.idle = 0

    def _rank(self, rank: int, draw: random.Random) -> Iterator[None]:
        for call, num_rows in enumerate(self.calls):
            epochs = [(epoch + 1) % WRAP for epoch in self.epochs[rank]]
            stride = min(self.programs[rank], num_rows)
            programs = [
                [
                    self._thread(rank, call, range(first, num_rows, stride), line, epochs)
                    for line in range(LINES)
                ]
                for first in draw.sample(range(stride), stride)
            ]
            while programs:
                program = draw.choice(programs[: self.places])
                thread = draw.choice(program)
                if next(thread, "ended") == "ended":
                    program.remove(thread)
                if not program:
                    programs.remove(program)
                yield
            self.epochs[rank][:num_rows] = epochs[:num_rows]

    def _thread(
        self, rank: int, call: int, rows: range, line: int, epochs: list[int]
    ) -> Iterator[None]:
        for row in rows:
            yield from self._send(rank, call, row, line, epochs[row])
        for row in rows:
            yield from self._await(rank, call, row, line, epochs[row])

    def _send(self, rank: int, call: int, row: int, line: int, epoch: int) -> Iterator[None]:
        for step in range(1, self.world + 1):
            peer = (rank + step) % self.world
            place = self._place(epoch, row, rank, line)
            self.flying.append((peer, place, (word_of(rank, call, row, line), epoch)))
            self.idle = 0
            yield

    def _await(self, rank: int, call: int, row: int, line: int, epoch: int) -> Iterator[None]:
        while True:
            seen = []
            for source in range(self.world):
                place = self._place(epoch, row, source, line)
                seen.append(self.memory[rank].get(place, (-1, self._epoch_before(place))))
                yield
            if all(found == epoch for _, found in seen):
                break
            self.idle += 1
        self.results[rank].append((call, row, line, *(word for word, _ in seen)))

    def _place(self, epoch: int, row: int, source: int, line: int) -> tuple[int, ...]:
        return (epoch % self.num_buffers, row, source, line)

    def _epoch_before(self, place: tuple[int, ...]) -> int:
        """That of the last call which wrote there, long ago."""
        return next(
            epoch % WRAP
            for epoch in range(self.first_epoch, self.first_epoch - self.num_buffers, -1)
            if epoch % self.num_buffers == place[0]
        )


def word_of(rank: int, call: int, row: int, line: int) -> int:
    return ((call * 100 + row) * 10 + line) * 10 + rank


def expected(ranks: Ranks) -> list[tuple[int, ...]]:
    """What every rank has to find, in order."""
    return [
        (call, row, line, *(word_of(rank, call, row, line) for rank in range(ranks.world)))
        for call, num_rows in enumerate(ranks.calls)
        for row in range(num_rows)
        for line in range(LINES)
    ]
