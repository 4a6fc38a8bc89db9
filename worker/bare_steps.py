"""Steps of one worker planned by hand, without a scheduler: for profiles and benchmarks."""

import time
from collections import deque
from itertools import count
from typing import NamedTuple

from lockstep.comm.messages import Chunk, JoinLane, ReplicaPlan, StepPlan, pack_ids
from lockstep.comm.sampling import SamplingParams
from lockstep.parallel.agreement import agree, propose
from lockstep.worker.config import WorkerConfig
from lockstep.worker.graphs.dispatch import create_dispatcher
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.loop import Worker
from lockstep.worker.results import Pending

_ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
# As many as in serving: the next step is launched while one runs.
_IN_FLIGHT = 2


def blocks_per_lane(config: WorkerConfig) -> int:
    """KV blocks that hold a lane of ``max_model_len`` tokens."""
    return -(-config.schedule.max_model_len // config.cache.block_size)


class StepTimes(NamedTuple):
    """Microseconds of one step, over several: by the clock, and of that in launching it."""

    step_us: float
    host_us: float


class BareSteps:
    """Plans for a started worker, each agreed on as its scheduler would.

    A lane owns the blocks of a whole context, so lanes may decode until ``max_model_len``.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        config = worker.config
        self._dispatch = create_dispatcher(config.graph, config.schedule).dispatch
        self._blocks_per_lane = blocks_per_lane(config)
        self._step_ids = count()
        self._num_lanes = 0

    def start_lanes(self, num_lanes: int, prompt_len: int) -> None:
        """Let all lanes leave, then compute a prompt in each of ``num_lanes`` new ones."""
        leaves = list(range(self._num_lanes))
        for lane in range(num_lanes):
            chunk = Chunk(lane, pack_ids([lane + 5] * prompt_len), True)
            joins, idle = [self.join(lane, prompt_len)], list(range(lane))
            replica = ReplicaPlan(
                lane + 1, leaves=leaves, joins=joins, chunks=[chunk], idle_lanes=idle
            )
            self.run(replica)
            leaves = []

    def join(self, lane: int, prompt_len: int) -> JoinLane:
        """A greedy request without an end, at the lane's own blocks."""
        first = 1 + lane * self._blocks_per_lane
        return JoinLane(
            lane=lane,
            req_id=f"r{lane}",
            seed=lane,
            sampling=_ENDLESS,
            stop_ids=b"",
            num_prompt_tokens=prompt_len,
            num_computed_tokens=0,
            num_output_tokens=0,
            block_ids=pack_ids(range(first, first + self._blocks_per_lane)),
        )

    def plan(self, replica: ReplicaPlan, max_mode: RunMode = RunMode.FULL) -> StepPlan:
        """The next step, in the best run mode of at most ``max_mode`` that has a graph."""
        agreement = agree([propose(replica, max_mode=max_mode)], self._dispatch)
        return StepPlan(0, next(self._step_ids), agreement, [replica])

    def run(self, replica: ReplicaPlan, max_mode: RunMode = RunMode.FULL) -> StepPlan:
        """Take one step and wait for it; returns its plan."""
        plan = self.plan(replica, max_mode)
        self._worker.execute(plan)
        self._num_lanes = replica.num_lanes
        return plan

    def time(
        self, replica: ReplicaPlan, num_steps: int, max_mode: RunMode = RunMode.FULL
    ) -> StepTimes:
        """Take ``num_steps`` equal steps, the next one launched while one runs."""
        pending: deque[Pending] = deque()
        launching = 0.0
        began = time.perf_counter()
        for _ in range(num_steps):
            launched = time.perf_counter()
            pending += self._worker.launch(self.plan(replica, max_mode))
            launching += time.perf_counter() - launched
            if len(pending) == _IN_FLIGHT:
                pending.popleft().result()
        while pending:
            pending.popleft().result()
        self._num_lanes = replica.num_lanes
        each = 1e6 / num_steps
        return StepTimes((time.perf_counter() - began) * each, launching * each)
