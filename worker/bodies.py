"""The body of a step in each run mode: called, in segments, or as one graph."""

from dataclasses import dataclass

import numpy as np

from lockstep.comm.messages import ReplicaPlan, StepAgreement
from lockstep.parallel.rank_spec import RankSpec
from lockstep.worker.forward import ForwardInputs
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.lanes import LaneTable
from lockstep.worker.masks import LaneMasks
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
    masks: LaneMasks
    inputs: StepInputs
    step: Step
    graphs: StepGraphs


class Bodies:
    """Runs the body that a plan asks for, padded as agreed. The lanes' schedule is already set."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts

    def run(self, agreement: StepAgreement, replica: ReplicaPlan, query_lens: list[int]) -> int:
        """Launch it; returns how many lanes have logits."""
        graphs, padded = self._parts.graphs, agreement.num_tokens_padded
        if agreement.run_mode == RunMode.FULL and padded is not None:
            return self._full(agreement.uniform_query_len, padded, replica, query_lens)
        inputs = self._inputs(replica, query_lens, padded)
        run = graphs.pieces if agreement.run_mode == RunMode.PIECEWISE else self._parts.step.body
        run(inputs)
        return len(inputs.attention.context_lens)

    def _full(self, uniform: int, padded: int, replica: ReplicaPlan, query_lens: list[int]) -> int:
        if uniform:
            self._parts.graphs.body(padded)
            return padded
        self._set_batch(replica, query_lens, padded)
        self._parts.graphs.mixed_body(padded)
        return max(1, replica.num_lanes)

    def _inputs(
        self, replica: ReplicaPlan, query_lens: list[int], padded: int | None
    ) -> ForwardInputs:
        """In decode form where each lane can have one of the tokens, which is faster."""
        parts, num_lanes = self._parts, max(1, replica.num_lanes)
        if not replica.chunks and num_lanes <= (padded or num_lanes) <= parts.state.max_lanes:
            return parts.inputs.decode(padded or num_lanes)
        num_tokens = padded or sum(query_lens)
        self._set_batch(replica, query_lens, num_tokens)
        # 1 would say that every row has exactly one query, which idle lanes have not.
        return parts.inputs.mixed(num_tokens, num_lanes, max([2, *query_lens]))

    def _set_batch(self, replica: ReplicaPlan, query_lens: list[int], num_tokens: int) -> None:
        parts = self._parts
        parts.state.set_batch(*parts.upload.send(*_tokens(replica, query_lens, num_tokens)))
        starts = np.cumsum([0, *query_lens])
        for chunk in replica.chunks:
            span = slice(starts[chunk.lane], starts[chunk.lane + 1])
            start = parts.lanes.take_chunk(chunk.lane, query_lens[chunk.lane])
            parts.sampling.record_chunk(chunk.lane, parts.state.chunk_ids[span], start=start)


def _tokens(
    replica: ReplicaPlan, query_lens: list[int], num_tokens: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(chunk_ids, token_lanes, from_chunk) for ``StepState.set_batch``."""
    starts = np.cumsum([0, *query_lens])
    chunk_ids = np.zeros(num_tokens, dtype=np.int64)
    token_lanes = np.zeros(num_tokens, dtype=np.int64)
    token_lanes[: starts[-1]] = np.repeat(np.arange(replica.num_lanes), query_lens)
    from_chunk = [0] * replica.num_lanes
    for chunk in replica.chunks:
        span = slice(starts[chunk.lane], starts[chunk.lane + 1])
        chunk_ids[span] = np.frombuffer(chunk.token_ids, dtype="<i4")
        from_chunk[chunk.lane] = 1
    return chunk_ids, token_lanes, from_chunk
