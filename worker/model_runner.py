"""One step on one rank: apply a plan, run body and tail, start the result home.

Between body and tail, masks of grammars go into the logits, in front of all that reads them.
"""

from collections.abc import Iterator

from lockstep.comm.messages import ReplicaPlan, StepPlan
from lockstep.worker.bodies import Bodies, RunnerParts
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.host_logprobs import HostLogprobs, lanes_with_logprobs
from lockstep.worker.results import HostRow, PendingStep, StepIdentity


class ModelRunner:
    """Launches steps and never waits for them.

    Args:
        parts: see ``RunnerParts``.
        replica_index: place of this rank's replica in ``StepPlan.replicas``.
    """

    def __init__(self, parts: RunnerParts, replica_index: int) -> None:
        self._parts = parts
        self._replica_index = replica_index
        self._bodies = Bodies(parts)
        ring = parts.state.output
        self._rows = [HostRow(ring) for _ in range(ring.depth)]
        self._num_launched = 0
        self._device_step = 0
        self._schedule: tuple[list[int], list[int]] | None = None

    def launch(self, plan: StepPlan) -> Iterator[PendingStep]:
        """Launch the steps that ``plan`` grants, one each time the iterator is advanced."""
        replica = plan.replicas[self._replica_index]
        if plan.step_id != self._device_step:
            self._parts.state.set_step(plan.step_id)
        self._device_step = plan.step_id + plan.num_steps
        self._apply(replica)
        for offset in range(plan.num_steps):
            logprobs = self._run(plan, replica)
            yield self._pending(plan, plan.step_id + offset, replica.num_lanes, logprobs)

    def clear(self) -> None:
        """Forget all lanes and steps, after warm-up."""
        self._parts.state.clear()
        self._num_launched = self._device_step = 0
        self._schedule = None

    def _apply(self, replica: ReplicaPlan) -> None:
        parts = self._parts
        parts.state.apply(parts.lanes.edit(replica), parts.upload)
        parts.sampling.reset_rows(replica.leaves)
        parts.sampling.move_rows(replica.moves)
        parts.sampling.write_rows(replica.joins)

    def _run(self, plan: StepPlan, replica: ReplicaPlan) -> HostLogprobs | None:
        parts, agreement = self._parts, plan.agreement
        schedule = _schedule(replica)
        if schedule != self._schedule:
            parts.state.set_schedule(*parts.upload.send(*schedule))
            self._schedule = schedule
        num_lanes = self._bodies.run(agreement, replica, schedule[0])
        if replica.masks:
            parts.masks.apply(parts.state.logits, replica.masks)
        eager = agreement.run_mode == RunMode.EAGER and not replica.chunks
        tail = parts.step.tail if eager else parts.graphs.tail
        sampled = tail(num_lanes, parts.sampling.variant())
        if sampled is None or sampled.logprobs is None:
            return None
        wanted = lanes_with_logprobs(parts.sampling, replica.num_lanes)
        return HostLogprobs(sampled.logprobs, wanted)

    def _pending(
        self, plan: StepPlan, step_id: int, num_lanes: int, logprobs: HostLogprobs | None
    ) -> PendingStep:
        row = self._rows[self._num_launched % len(self._rows)]
        row.start(self._parts.state.output, self._num_launched)
        self._num_launched += 1
        spec, run_mode = self._parts.spec, plan.agreement.run_mode
        identity = StepIdentity(
            plan.epoch, step_id, spec.dp_rank, spec.tp_rank, num_lanes, run_mode
        )
        return PendingStep(identity, row, logprobs)


def _schedule(replica: ReplicaPlan) -> tuple[list[int], list[int]]:
    """(query_lens, samples) of the replica's lanes."""
    query_lens, samples = [1] * replica.num_lanes, [1] * replica.num_lanes
    for lane in replica.idle_lanes:
        query_lens[lane] = samples[lane] = 0
    for chunk in replica.chunks:
        query_lens[chunk.lane] = len(chunk.token_ids) // 4
        samples[chunk.lane] = int(chunk.samples)
    return query_lens, samples
