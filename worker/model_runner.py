"""One step on one rank: apply a plan, run body and tail, start the result home."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lockstep.comm.messages import ReplicaPlan, StepPlan
from lockstep.parallel.rank_spec import RankSpec
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.host_logprobs import HostLogprobs, lanes_with_logprobs
from lockstep.worker.lanes import LaneTable
from lockstep.worker.results import HostRow, PendingStep, StepIdentity
from lockstep.worker.sampler import SampleOutput
from lockstep.worker.sampling_state import LaneSampling
from lockstep.worker.state import StepState
from lockstep.worker.step import Step
from lockstep.worker.step_graphs import StepGraphs
from lockstep.worker.step_inputs import StepInputs
from lockstep.worker.upload import Uploader


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The made parts a ModelRunner drives."""

    spec: RankSpec
    state: StepState
    sampling: LaneSampling
    lanes: LaneTable
    upload: Uploader
    inputs: StepInputs
    step: Step
    graphs: StepGraphs


class ModelRunner:
    """Launches steps and never waits for them.

    Args:
        parts: see ``RunnerParts``.
        replica_index: place of this rank's replica in ``StepPlan.replicas``.
    """

    def __init__(self, parts: RunnerParts, replica_index: int) -> None:
        self._parts = parts
        self._replica_index = replica_index
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
        query_lens, samples = _schedule(replica)
        if (query_lens, samples) != self._schedule:
            self._parts.state.set_schedule(*self._parts.upload.send(query_lens, samples))
            self._schedule = (query_lens, samples)
        if replica.chunks:
            sampled = self._run_mixed(replica, query_lens)
        else:
            sampled = self._run_decode(plan, replica)
        if sampled is None or sampled.logprobs is None:
            return None
        wanted = lanes_with_logprobs(self._parts.sampling, replica.num_lanes)
        return HostLogprobs(sampled.logprobs, wanted)

    def _run_decode(self, plan: StepPlan, replica: ReplicaPlan) -> SampleOutput | None:
        num_lanes = plan.agreement.num_tokens_padded or max(1, replica.num_lanes)
        parts = self._parts
        variant = parts.sampling.variant()
        if plan.agreement.run_mode == RunMode.FULL:
            parts.graphs.body(num_lanes)
            return parts.graphs.tail(num_lanes, variant)
        parts.step.body(parts.inputs.decode(num_lanes))
        return parts.step.tail(num_lanes, variant)

    def _run_mixed(self, replica: ReplicaPlan, query_lens: list[int]) -> SampleOutput | None:
        parts = self._parts
        chunk_ids, token_lanes, from_chunk = parts.upload.send(*_tokens(replica, query_lens))
        starts = np.cumsum([0, *query_lens])
        for chunk in replica.chunks:
            span = slice(starts[chunk.lane], starts[chunk.lane + 1])
            start = parts.lanes.take_chunk(chunk.lane, query_lens[chunk.lane])
            parts.sampling.record_chunk(chunk.lane, chunk_ids[span], start=start)
        # 1 would say that every row has exactly one query, which idle lanes have not.
        longest = max(2, *query_lens)
        parts.step.body(parts.inputs.mixed(chunk_ids, token_lanes, from_chunk, longest))
        return parts.graphs.tail(replica.num_lanes, parts.sampling.variant())

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


def _tokens(
    replica: ReplicaPlan, query_lens: list[int]
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(chunk_ids, token_lanes, from_chunk) for ``StepInputs.mixed``."""
    starts = np.cumsum([0, *query_lens])
    chunk_ids = np.zeros(starts[-1], dtype=np.int64)
    from_chunk = [0] * replica.num_lanes
    for chunk in replica.chunks:
        span = slice(starts[chunk.lane], starts[chunk.lane + 1])
        chunk_ids[span] = np.frombuffer(chunk.token_ids, dtype="<i4")
        from_chunk[chunk.lane] = 1
    return chunk_ids, np.repeat(np.arange(replica.num_lanes), query_lens), from_chunk
