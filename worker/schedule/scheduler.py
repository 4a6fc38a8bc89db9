"""The one planner: queues, lanes and blocks of every replica, and what each group does next."""

from collections import Counter
from collections.abc import Sequence

from lockstep.comm.messages import (
    AddRequest,
    ReplicaPlan,
    StepPlan,
    StepResult,
    TokenDelta,
    lost_request,
)
from lockstep.parallel.agreement import agree, propose
from lockstep.parallel.config import ParallelConfig
from lockstep.worker.config import CacheConfig, GraphConfig, ModelConfig, ScheduleConfig
from lockstep.worker.grammars.compiler import GrammarCompiler
from lockstep.worker.graphs.dispatch import create_dispatcher
from lockstep.worker.graphs.manifest import build_manifest
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.request import Request
from lockstep.worker.schedule.checks import Limits, QueueFull, check_request
from lockstep.worker.schedule.compiling import Compiling
from lockstep.worker.schedule.group import LockstepGroup, StepInFlight
from lockstep.worker.schedule.late_captures import LateCaptures
from lockstep.worker.schedule.policy import LoadBalancer
from lockstep.worker.schedule.replica import Due, Replica
from lockstep.worker.schedule.results import read_result
from lockstep.worker.schedule.seeds import draw_seed
from lockstep.worker.schedule.stats import SchedulerStats, replica_stats
from lockstep.worker.schedule.step_counts import StepCounts


class Scheduler:
    """Plans the steps of all lockstep groups; plain Python, not thread-safe, never waits.

    Turn by turn: ``plan`` gives a step of a group while there is one to give, ``commit`` takes
    each replica's result in order. With ``run_ahead`` above 1 that many steps of a group may be
    in flight, else one.

    Args:
        num_blocks: KV blocks of a replica, block 0 included; one number or one per replica.
        query_len: tokens per request of a decode step (1 without speculation).
        epoch: life number of the groups; results of another one are dropped.
        compiler: of grammars; without one, requests that have one are refused.
    """

    def __init__(
        self,
        model: ModelConfig,
        schedule: ScheduleConfig,
        cache: CacheConfig,
        parallel: ParallelConfig,
        graph: GraphConfig,
        num_blocks: int | Sequence[int],
        query_len: int = 1,
        epoch: int = 0,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        blocks = [num_blocks] * parallel.dp_size if isinstance(num_blocks, int) else num_blocks
        if len(blocks) != parallel.dp_size:
            raise ValueError(
                f"num_blocks must be given for dp_size={parallel.dp_size} replicas, got {blocks}"
            )
        self.epoch = epoch
        self.parallel = parallel
        self._schedule = schedule
        self._query_len = query_len
        self._dispatcher = create_dispatcher(graph, schedule, query_len)
        self._manifest = build_manifest(self._dispatcher, capture=graph.capture)
        self._steps = StepCounts(self._dispatcher)
        self._limits = Limits(
            model.vocab_size, schedule.max_model_len, cache.block_size, min(blocks) - 1
        )
        self._replicas = [
            Replica(
                schedule,
                num_blocks=count,
                block_size=cache.block_size,
                caching=cache.enable_prefix_caching,
            )
            for count in blocks
        ]
        self._groups = self._form_groups(parallel.lockstep_dp_size)
        self._balancer = LoadBalancer(parallel.dp_size)
        self._compiling = Compiling(compiler)
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._deltas: list[TokenDelta] = []
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    def _form_groups(self, size: int) -> list[LockstepGroup]:
        return [
            LockstepGroup(
                first,
                self._replicas[first : first + size],
                LateCaptures(self._dispatcher, self._manifest),
                max_prefill_defer_steps=self._schedule.max_prefill_defer_steps,
            )
            for first in range(0, len(self._replicas), size)
        ]

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def num_waiting(self) -> int:
        return len(self._compiling) + sum(len(replica.waiting) for replica in self._replicas)

    def check(self, add: AddRequest) -> None:
        """Raise what ``add`` would raise about the request itself; safe from any thread."""
        check_request(add, self._limits)

    def add(self, add: AddRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: names field, value and limit: an id out of range, a prompt that is empty
                or too long, a request that can never fit, a ``req_id`` that is in use.
            QueueFull: ``max_queued_requests`` wait already.

        One with a grammar that cannot be compiled ends with an error instead.
        """
        max_outputs = check_request(add, self._limits)
        if add.req_id in self._requests:
            raise ValueError(f"req_id must not be in use, got {add.req_id!r} twice")
        limit = self._schedule.max_queued_requests
        if limit is not None and self.num_waiting >= limit:
            raise QueueFull(f"max_queued_requests must be at most {limit}, got one more")
        seed = add.sampling.seed
        if seed is None:
            seed = draw_seed(self._schedule.seed, self._num_arrived)
        request = Request(add, max_outputs=max_outputs, seed=seed, arrival=self._num_arrived)
        structured = add.sampling.structured_outputs is not None
        if structured:
            self._compiling.start(add, request)
        self._num_arrived += 1
        self._requests[add.req_id] = request
        replica = self._replicas[self._balancer.place(request)]
        if not structured:
            replica.waiting.enqueue(request)

    def abort(self, req_id: str) -> None:
        """End a request in any state; one that is not known is only counted."""
        request = self._requests.get(req_id)
        if request is None:
            self._counts["unknown_aborts"] += 1
            return
        self._finish(request, "abort")
        self._deltas.append(TokenDelta(req_id, finish_reason="abort", dp_rank=request.replica))

    def fail_all(self, error: str) -> None:
        """End every request with an error, since the ranks cannot go on."""
        for request in list(self._requests.values()):
            self._finish(request, "error")
            self._deltas.append(lost_request(request.req_id, error))

    def plan(self, group: int) -> StepPlan | None:
        """The next step of a group; None if there is nothing to do or results are awaited."""
        ours = self._groups[group]
        if self._compiling:
            self._queue_compiled()
        if ours.must_await(self._schedule.run_ahead) or not ours.has_work():
            return None
        if ours.captures.due(ours.next_step_id):
            return self.plan_capture(group)
        dues = [replica.settle() for replica in ours.replicas]
        if not self._make_room(ours, dues) or not ours.has_work():
            return None
        pairs = list(zip(ours.replicas, dues, strict=True))
        prefill = len(pairs) == 1 or ours.alignment.allow(
            [replica.wants_prefill(due) for replica, due in pairs],
            [bool(due.prefilling) for due in dues],
            [replica.num_decodes(due) > 0 for replica, due in pairs],
        )
        built = [replica.build(due, prefill=prefill) for replica, due in pairs]
        plans = [plan for plan, _ in built]
        proposals = [
            propose(plan, max_mode=RunMode.FULL, query_len=self._query_len) for plan in plans
        ]
        dispatch = ours.captures.dispatcher.dispatch
        agreement = ours.agree(proposals, dispatch, query_len=self._query_len)
        self._steps.count(ours.first_dp_rank, agreement, proposals)
        step_id = ours.launch(agreement, [lanes for _, lanes in built])
        return StepPlan(self.epoch, step_id, agreement, plans)

    def plan_capture(self, group: int) -> StepPlan | None:
        """The capture of a group's next late graph; None if none is left, or steps are in flight.

        A step of its own, so that all ranks of the group capture between the same two steps.
        """
        ours = self._groups[group]
        if ours.in_flight or not ours.captures.num_left:
            return None
        idle = [ReplicaPlan(0) for _ in ours.replicas]
        proposals = [propose(plan, max_mode=RunMode.FULL) for plan in idle]
        agreement = agree(proposals, self._dispatcher.dispatch, query_len=self._query_len)
        step_id, position = ours.order_capture(agreement)
        return StepPlan(self.epoch, step_id, agreement, idle, capture=position)

    def _make_room(self, group: LockstepGroup, dues: list[Due]) -> bool:
        """False if blocks are short and steps in flight may still free some."""
        for replica, due in zip(group.replicas, dues, strict=True):
            if not replica.lacks_blocks(due):
                continue
            if group.in_flight:
                return False
            replica.preempt(due)
        return True

    def commit(self, result: StepResult) -> list[TokenDelta]:
        """Take a replica's result and return the new tokens.

        One of another epoch, of a step that is not in flight, or of a tp_rank above 0 is dropped.

        Raises:
            RankMismatch: the result does not fit what was planned.
        """
        size = len(self._groups[0].replicas)
        group_index, index = divmod(result.dp_rank, size)
        lanes = None
        if result.epoch == self.epoch and not result.tp_rank:
            lanes = self._groups[group_index].land(result.step_id, index)
        if lanes is None:
            self._counts["dropped_results"] += 1
            return []
        if result.captured is not None:
            self._replicas[result.dp_rank].late_graphs.append(result.captured)
        self._counts["bad_lanes"] += len(result.bad_lanes)
        return read_result(
            self._replicas[result.dp_rank],
            lanes,
            result,
            vocab_size=self._limits.vocab_size,
            finish=self._finish,
        )

    def take_deltas(self) -> list[TokenDelta]:
        """Ends that came without a step: aborts and errors, each once."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def has_work(self) -> bool:
        return bool(self._requests)

    def oldest_step(self, group: int) -> StepInFlight | None:
        """The group's oldest step whose results have not all come."""
        in_flight = self._groups[group].in_flight
        return in_flight[0] if in_flight else None

    def stats(self) -> SchedulerStats:
        uses = self._steps.graph_uses()
        steps: Counter[str] = Counter()
        for use in uses:
            steps[use.run_mode] += use.num_steps
        return SchedulerStats(
            replicas=[replica_stats(replica) for replica in self._replicas],
            steps_by_run_mode=dict(steps),
            num_tokens=sum(use.num_tokens for use in uses),
            num_padding_tokens=sum(use.num_padding_tokens for use in uses),
            num_finished=dict(self._finished),
            num_dropped_results=self._counts["dropped_results"],
            num_unknown_aborts=self._counts["unknown_aborts"],
            graph_uses=uses,
            batch_sizes=self._steps.batch_sizes(),
            num_bad_lanes=self._counts["bad_lanes"],
            epoch=self.epoch,
            num_late_graphs=self._manifest.num_late,
        )

    def check_conserved(self) -> None:
        """Raise AssertionError unless every block is free, cached, or held by a live request."""
        for replica in self._replicas:
            replica.pool.check_conserved(request.block_ids for request in replica.lanes)

    def _queue_compiled(self) -> None:
        for request, failure in self._compiling.take_done():
            if failure is None:
                self._replicas[request.replica].waiting.enqueue(request)
                continue
            self._finish(request, "error")
            self._deltas.append(failure)

    def _finish(self, request: Request, reason: str) -> None:
        del self._requests[request.req_id]
        self._compiling.remove(request)
        self._finished[reason] += 1
        self._balancer.credit(request)
        self._replicas[request.replica].finish(request, reason)
