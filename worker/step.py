"""The two parts of a step, body and tail, as functions of static state: what graphs capture."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lockstep.comm.collectives import Communicator
from lockstep.worker.flow import Flow
from lockstep.worker.forward import AttentionMetadata, ForwardInputs
from lockstep.worker.kv_cache import KVCache
from lockstep.worker.output_ring import NOT_FINITE, OUT_OF_STEP, PEER_SHIFT, SLOT_FAULT
from lockstep.worker.sampler import SampleOutput, Sampler
from lockstep.worker.sampling_state import Variant
from lockstep.worker.state import StepState


class Model(Protocol):
    """What a step needs of a model."""

    num_layers: int

    def __call__(self, inputs: ForwardInputs, kv: KVCache) -> Tensor: ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor: ...

    def new_flow(self, num_tokens: int) -> Flow: ...

    def run_segment(self, index: int, flow: Flow) -> None: ...

    def attend(self, index: int, flow: Flow, metadata: AttentionMetadata, kv: KVCache) -> None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """Body: inputs to logits. Tail: logits to tokens, results and advanced lanes.

    Both read and write only ``state``, the sampling state and the KV cache, so replaying them is
    the same as calling them. ``dp`` joins the replicas that take every step together.
    """

    model: Model
    kv: KVCache
    state: StepState
    sampler: Sampler
    dp: Communicator

    def body(self, inputs: ForwardInputs) -> None:
        """Forward ``inputs`` and leave one row of logits per lane in ``state.logits``."""
        self.begin()
        self.leave_logits(self.model(inputs, self.kv), inputs.logit_rows)

    def leave_logits(self, hidden: Tensor, logit_rows: Tensor | None) -> None:
        """The end of a body: ``hidden`` is that of every token."""
        if logit_rows is not None:
            hidden = hidden[logit_rows]
        self.model.logits(hidden, self.state.logits[: hidden.shape[0]])

    def tail(self, num_lanes: int, variant: Variant) -> SampleOutput:
        """Sample for the lanes that the plan lets sample, store the row, advance all lanes."""
        tail = self.fused_tail if self.state.device.type == "cuda" else self.plain_tail
        sampled = tail(num_lanes, variant)
        if self.state.clock is not None:
            self.state.clock.end()
        return sampled

    def plain_tail(self, num_lanes: int, variant: Variant) -> SampleOutput:
        """``tail`` in torch operations, on any device: what the fused one is tested against."""
        state = self.state
        active = state.active[:num_lanes].clone()
        emits = active & state.samples[:num_lanes]
        sampled = self.sampler.sample(state.logits[:num_lanes], emits, variant)
        ended = self.sampler.advance(sampled, emits, variant)
        counts = emits & sampled.finite
        status = self._status(emits & ~sampled.finite, num_lanes)
        state.output.write(counts, torch.where(counts, sampled.token_ids, 0), status)
        state.advance(sampled.token_ids, counts=counts, active=active, ended=ended)
        if self.dp.size > 1:
            state.next_step()
        return sampled

    def fused_tail(self, num_lanes: int, variant: Variant) -> SampleOutput:
        """``tail``, with all that follows the draw in one kernel."""
        from lockstep.worker.kernels.tail import finish

        state, sampler = self.state, self.sampler
        logits = state.logits[:num_lanes]
        scores, ids = sampler.candidates(logits, variant)
        token_ids, finite = finish(
            state, sampler.lanes, scores, ids,
            counts_tokens=variant >= Variant.FILTERED,
            my_peer=self.dp.rank,
        )  # fmt: skip
        state.output.next_row()
        if self.dp.size > 1:
            state.next_step()
        return SampleOutput(token_ids, finite, sampler.logprobs(logits, token_ids, variant))

    def begin(self) -> None:
        """The beginning of a body: its time is noted; replicas in lockstep tell their step."""
        if self.state.clock is not None:
            self.state.clock.begin()
        self._exchange_step_number()

    def _exchange_step_number(self) -> None:
        if self.dp.size == 1:
            return
        state = self.state
        mine = torch.zeros_like(state.peer_steps)
        mine[self.dp.rank] = state.step_number[0]
        state.peer_steps.copy_(self.dp.all_reduce(mine))

    def _status(self, not_finite: Tensor, num_lanes: int) -> Tensor:
        status = not_finite.int() * NOT_FINITE + self.state.faults[:num_lanes] * SLOT_FAULT
        if self.dp.size == 1:
            return status
        steps = self.state.peer_steps
        differs = (steps != steps[self.dp.rank]).int()
        out_of_step = OUT_OF_STEP + (differs.argmax() << PEER_SHIFT)
        return status + (differs.amax() * out_of_step).int()
