"""Forward inputs out of StepState, by device operations only, so that a graph can hold them."""

import torch
from torch import Tensor

from lockstep.worker.forward import AttentionMetadata, ForwardInputs
from lockstep.worker.state import StepState


class StepInputs:
    """Builds the inputs of a step. A lane that is not live is a dummy request on block 0.

    One builder serves warm-up, capture, eager steps and replay, so all of them see one layout.
    """

    def __init__(self, state: StepState, block_size: int, max_model_len: int) -> None:
        self._state = state
        self._block_size = block_size
        self._max_model_len = max_model_len

    def decode(self, num_lanes: int) -> ForwardInputs:
        """One token for each of ``num_lanes`` lanes, padding lanes included."""
        state = self._state
        build = self._decode_in_one_kernel if state.device.type == "cuda" else self._decode_in_torch
        token_ids, positions, slots, context_lens, table = build(num_lanes)
        metadata = AttentionMetadata(
            slots=slots,
            query_start_loc=state.lane_ids[: num_lanes + 1],
            context_lens=context_lens,
            block_table=table,
            max_query_len=1,
            max_context_len=self._max_model_len,
        )
        return ForwardInputs(token_ids, positions, metadata, logit_rows=None)

    def _decode_in_torch(self, num_lanes: int) -> tuple[Tensor, ...]:
        state = self._state
        live = state.active[:num_lanes] & state.samples[:num_lanes]
        positions = torch.where(live, state.num_computed[:num_lanes], 0)
        table = torch.where(live.unsqueeze(1), state.block_table[:num_lanes], 0)
        blocks = table.gather(1, (positions // self._block_size).unsqueeze(1)).squeeze(1).long()
        state.faults[:num_lanes].copy_(live & (blocks == 0))
        slots = blocks * self._block_size + positions % self._block_size
        token_ids = torch.where(live, state.last_token[:num_lanes], 0)
        return token_ids, positions, slots, (positions + 1).int(), table

    def _decode_in_one_kernel(self, num_lanes: int) -> tuple[Tensor, ...]:
        from lockstep.worker.kernels.decode_inputs import decode_inputs

        # A dummy lane has one token, the one it stores, so its row of the table is not looked at.
        table = self._state.block_table[:num_lanes]
        return *decode_inputs(self._state, num_lanes, self._block_size), table

    def mixed(self, num_tokens: int, num_lanes: int, max_query_len: int) -> ForwardInputs:
        """``state.query_lens`` tokens of each lane, in lane order, then padding.

        What the tokens are, ``state.set_batch`` said; lanes beyond those it knew have no token.

        Args:
            max_query_len: at least 2; in a graph the most that a lane can have.
        """
        state = self._state
        active, query_lens = state.active[:num_lanes], state.query_lens[:num_lanes]
        token_lanes = state.token_lanes[:num_tokens]
        num_computed = state.num_computed[:num_lanes]
        ends = query_lens.cumsum(0)
        starts = ends - query_lens
        at = torch.arange(num_tokens, device=state.device)
        live = active[token_lanes] & (at < ends[-1])
        positions = num_computed[token_lanes] + at - starts[token_lanes]
        positions = torch.where(live, positions, 0)
        table = torch.where(active.unsqueeze(1), state.block_table[:num_lanes], 0)
        blocks = torch.where(live, table[token_lanes, positions // self._block_size], 0).long()
        self._note_faults(token_lanes, live & (blocks == 0), num_lanes)
        metadata = AttentionMetadata(
            slots=blocks * self._block_size + positions % self._block_size,
            query_start_loc=torch.cat([starts[:1], ends]).int(),
            context_lens=torch.where(active, num_computed + query_lens, 1).clamp(min=1).int(),
            block_table=table,
            max_query_len=max_query_len,
            max_context_len=self._max_model_len,
        )
        decoded = state.last_token[token_lanes]
        from_chunk = state.from_chunk[token_lanes] == 1
        token_ids = torch.where(from_chunk, state.chunk_ids[:num_tokens], decoded)
        token_ids = torch.where(live, token_ids, 0)
        return ForwardInputs(token_ids, positions, metadata, logit_rows=(ends - 1).clamp(min=0))

    def _note_faults(self, token_lanes: Tensor, faulty: Tensor, num_lanes: int) -> None:
        faults = self._state.faults[:num_lanes]
        faults.zero_().index_add_(0, token_lanes, faulty.int()).clamp_(max=1)
