"""One replica's lanes and blocks, and how its part of a step is planned."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.comm.messages import (
    ID_BYTES,
    Chunk,
    GraphCost,
    JoinLane,
    LaneBlocks,
    LaneMask,
    ReplicaPlan,
    pack_ids,
)
from lockstep.worker.config import ScheduleConfig
from lockstep.worker.request import Request, RequestState
from lockstep.worker.schedule.block_keys import extend_keys
from lockstep.worker.schedule.block_pool import BlockPool
from lockstep.worker.schedule.lanes import arrange
from lockstep.worker.schedule.policy import choose_victim
from lockstep.worker.schedule.waiting import WaitingQueue


@dataclass(slots=True)
class Due:
    """Lanes that need more than one more decode; found once a step."""

    leaving: list[int] = field(default_factory=list)
    growing: list[Request] = field(default_factory=list)
    prefilling: list[Request] = field(default_factory=list)
    preempted: bool = False


class Piece(NamedTuple):
    """Tokens ``start`` .. ``end - 1`` of a request, computed in one step."""

    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        return self.end == self.request.prefill_target


class StepLanes(NamedTuple):
    """How to read a replica's result of a step: requests by lane, and lanes that sample nothing.

    ``masked`` if grammars have a say in it.
    """

    requests: tuple[Request, ...]
    pieces: tuple[Piece, ...] = ()
    silent: frozenset[int] = frozenset()
    masked: bool = False


class Replica:
    """Requests of one dp_rank. A plan is made in two halves, so that a lockstep group can look at
    all replicas before any of them changes: ``settle`` and ``preempt``, then ``build``.

    Blocks of a request that left are free at once: only plans hand blocks out, and the next plan
    applies the leave before anything else.
    """

    def __init__(
        self, schedule: ScheduleConfig, *, num_blocks: int, block_size: int, caching: bool
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.waiting = WaitingQueue(self.pool, block_size=block_size, caching=caching)
        self.lanes: list[Request] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.late_graphs: list[GraphCost] = []
        self._block_size = block_size
        self._caching = caching
        self._budget = schedule.max_num_batched_tokens
        self._max_lanes = min(schedule.max_num_seqs, schedule.max_num_batched_tokens)
        self._preempt = schedule.preempt
        self._snapshot: tuple[Request, ...] = ()
        self._structured: list[Request] = []

    def finish(self, request: Request, reason: str) -> None:
        """End a request in any state; if it has a lane, the next plan takes it out."""
        request.finish_reason = reason
        self.waiting.remove(request)
        self._surrender(request, RequestState.FINISHED)

    def publish(self, request: Request, num_computed: int) -> None:
        """Let others find the blocks that the first ``num_computed`` tokens, committed, fill."""
        if not request.block_ids:
            return
        full = num_computed // self._block_size if self._caching else 0
        extend_keys(request, full, self._block_size)
        for index in range(request.num_published, full):
            self.pool.publish(request.block_ids[index], request.block_keys[index])
        request.num_published = max(full, request.num_published)
        next_full = (request.num_published + 1) * self._block_size
        last = request.max_positions
        request.check_at = ID_BYTES * (1 + (min(next_full, last) if self._caching else last))
        if request.matcher is not None:
            request.check_at = 0

    @property
    def num_running(self) -> int:
        return sum(request.state is RequestState.RUNNING for request in self.lanes)

    def has_work(self) -> bool:
        """True if a step is needed: someone waits or runs."""
        running = (request.state is RequestState.RUNNING for request in self.lanes)
        return bool(self.waiting) or any(running)

    def settle(self) -> Due:
        """First half: sort out the lanes that need more than one more decode."""
        due, step = Due(), self.num_steps
        for request in [each for each in self.lanes if each.due_step <= step]:
            if request.state is not RequestState.RUNNING:
                due.leaving.append(request.lane)
            elif request.is_prefilling:
                due.prefilling.append(request)
            elif request.num_planned >= request.max_positions:
                due.leaving.append(request.lane)
                self._surrender(request, RequestState.DRAINING)
            else:
                due.growing.append(request)
        return due

    def lacks_blocks(self, due: Due) -> bool:
        return len(due.growing) > self.pool.available

    def preempt(self, due: Due) -> None:
        """Send requests back to the queue until the others can go on.

        Only while no step is in flight: a preempted request must know all its tokens.
        """
        while self.lacks_blocks(due):
            running = [each for each in self.lanes if each.state is RequestState.RUNNING]
            victim = choose_victim(running, self._preempt, self.num_steps)
            due.leaving.append(victim.lane)
            due.growing = [each for each in due.growing if each is not victim]
            due.prefilling = [each for each in due.prefilling if each is not victim]
            due.preempted = True
            self.num_preemptions += 1
            self.num_recomputed_tokens += victim.num_planned_by(self.num_steps)
            victim.num_preemptions += 1
            self._surrender(victim, RequestState.WAITING)
            self.waiting.put_back(victim)

    def num_decodes(self, due: Due) -> int:
        return len(self.lanes) - len(due.leaving) - len(due.prefilling)

    def wants_prefill(self, due: Due) -> bool:
        if due.prefilling:
            return True
        running = self._running(due)
        room = len(running) < self._max_lanes and not due.preempted
        return room and bool(self.waiting) and self.waiting.could_admit(running)

    def build(self, due: Due, *, prefill: bool) -> tuple[ReplicaPlan, StepLanes]:
        """Second half: the replica's part of a step; without ``prefill`` prompts wait."""
        budget = self._budget - self.num_decodes(due)
        grown = [(request, self._grow(request)) for request in due.growing]
        pieces, joins = list[Piece](), list[Piece]()
        if prefill and (due.prefilling or self.waiting):
            pieces, budget = self._cut(due.prefilling, budget)
            if not due.preempted:
                joins = self._admit(self._running(due), budget)
        self.num_steps += 1
        moves = self._rearrange(due.leaving, [piece.request for piece in joins])
        return self._plan(due, moves, joins, grown, pieces + joins)

    def _plan(
        self,
        due: Due,
        moves: list[tuple[int, int]],
        joins: list[Piece],
        grown: list[tuple[Request, bytes]],
        pieces: list[Piece],
    ) -> tuple[ReplicaPlan, StepLanes]:
        new_blocks = [LaneBlocks(request.lane, packed) for request, packed in grown]
        masks = self._masks() if self._structured else []
        if not pieces and not due.prefilling:
            plan = ReplicaPlan(len(self.lanes), due.leaving, moves, [], new_blocks, masks=masks)
            return plan, StepLanes(self._snapshot, masked=bool(masks))
        cut = {piece.request.lane for piece in pieces}
        idle = [request.lane for request in due.prefilling if request.lane not in cut]
        partial = [piece.request.lane for piece in pieces if not piece.samples]
        plan = ReplicaPlan(
            num_lanes=len(self.lanes),
            leaves=due.leaving,
            moves=moves,
            joins=[_join(piece) for piece in joins],
            new_blocks=new_blocks,
            chunks=[_chunk(piece) for piece in pieces],
            idle_lanes=idle,
            masks=masks,
        )
        silent = frozenset(idle + partial)
        return plan, StepLanes(self._snapshot, tuple(pieces), silent, bool(masks))

    def _masks(self) -> list[LaneMask]:
        """What grammars allow the lanes that sample in this step."""
        return [
            LaneMask(request.lane, request.matcher.mask)
            for request in self._structured
            if request.matcher is not None and not request.is_prefilling
        ]

    def _running(self, due: Due) -> list[Request]:
        if not due.leaving:
            return list(self.lanes)
        return [each for each in self.lanes if each.state is RequestState.RUNNING]

    def _surrender(self, request: Request, state: RequestState) -> None:
        self.pool.release(request.surrender(state))
        self.waiting.try_again()

    def _grow(self, request: Request) -> bytes:
        """Own one block more; returns its packed id."""
        block_id = self.pool.take_one()
        request.block_ids.append(block_id)
        self._decode_from(request, self.num_steps)
        return block_id.to_bytes(ID_BYTES, "little")

    def _decode_from(self, request: Request, step: int) -> None:
        """Let a lane decode until its blocks are full or its last output is planned."""
        until = min(len(request.block_ids) * self._block_size, request.max_positions)
        request.due_step = step + until - request.num_planned
        request.num_planned = until

    def _cut(self, requests: Iterable[Request], budget: int) -> tuple[list[Piece], int]:
        """The next piece of each prompt, as far as the budget goes."""
        pieces = list[Piece]()
        for request in requests:
            if not budget:
                break
            start = request.num_planned
            request.num_planned = min(request.prefill_target, start + budget)
            piece = Piece(request, start, request.num_planned)
            pieces.append(piece)
            budget -= piece.end - start
            if piece.samples:
                self._decode_from(request, self.num_steps + 1)
        return pieces, budget

    def _admit(self, running: list[Request], budget: int) -> list[Piece]:
        joins = list[Piece]()
        admissions = self.waiting.admissions(running)
        while budget and len(running) < self._max_lanes:
            request = next(admissions, None)
            if request is None:
                break
            pieces, budget = self._cut([request], budget)
            joins += pieces
        return joins

    def _rearrange(self, leaving: list[int], joins: list[Request]) -> list[tuple[int, int]]:
        if not leaving and not joins:
            return []
        num_lanes, moves, join_lanes = arrange(len(self.lanes), leaving, len(joins))
        for source, target in moves:
            self.lanes[target] = self.lanes[source]
            self.lanes[target].lane = target
        del self.lanes[num_lanes:]
        for lane, request in zip(join_lanes, joins, strict=True):
            self.lanes[lane : lane + 1] = [request]
            request.lane = lane
        self._snapshot = tuple(self.lanes)
        self._structured = [each for each in self.lanes if each.matcher is not None]
        return moves


def _join(piece: Piece) -> JoinLane:
    request = piece.request
    return JoinLane(
        lane=request.lane,
        req_id=request.req_id,
        seed=request.seed,
        sampling=request.sampling,
        stop_ids=request.stop_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=piece.start,
        num_output_tokens=request.num_outputs,
        block_ids=pack_ids(request.block_ids),
    )


def _chunk(piece: Piece) -> Chunk:
    ids = piece.request.ids(piece.start, piece.end)
    return Chunk(piece.request.lane, ids, piece.samples)
