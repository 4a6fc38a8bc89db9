"""All static device tensors of a rank that a captured graph may touch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.worker.lanes import LaneEdit
from lockstep.worker.output_ring import OutputRing
from lockstep.worker.step_clock import StepClock
from lockstep.worker.upload import Uploader

# Ranks compare steps in float32, which every all-reduce serves and which is exact up to here.
STEP_MODULUS = 1 << 20


class StepState:
    """One row a lane, allocated once at the largest size; a graph uses prefixes of the rows.

    ``num_computed`` and ``active`` are the device's truth: the tail of a step advances them, and a
    lane that sampled a stop id turns inactive there. ``query_lens`` and ``samples`` are the plan's
    word: how many tokens a lane computes in this step, and whether it then samples one.
    ``step_number`` is what replicas in lockstep tell each other, in ``peer_steps``.

    ``chunk_ids``, ``token_lanes`` and ``from_chunk`` are the tokens of a mixed step: see
    ``set_batch``.

    Args:
        max_tokens: of a step.
        ring_depth: at least run_ahead + 2.
        num_replicas: how many tell each other which step they are at.
        num_timestamps: steps whose times are kept; 0: none is noted, and ``clock`` is None.
    """

    def __init__(
        self,
        *,
        max_lanes: int,
        max_tokens: int,
        max_blocks_per_req: int,
        vocab_local: int,
        ring_depth: int,
        num_replicas: int,
        device: torch.device,
        num_timestamps: int = 0,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.max_lanes = max_lanes
        self.generation = 0
        self.device = device
        self.last_token = zeros(max_lanes, dtype=torch.int64)
        self.num_computed = zeros(max_lanes, dtype=torch.int64)
        self.active = zeros(max_lanes, dtype=torch.bool)
        self.block_table = zeros(max_lanes, max_blocks_per_req, dtype=torch.int32)
        self.query_lens = zeros(max_lanes, dtype=torch.int64)
        self.samples = zeros(max_lanes, dtype=torch.bool)
        self.chunk_ids = zeros(max_tokens, dtype=torch.int64)
        self.token_lanes = zeros(max_tokens, dtype=torch.int64)
        self.from_chunk = zeros(max_lanes, dtype=torch.int64)
        self.faults = zeros(max_lanes, dtype=torch.int32)
        self.logits = zeros(max_lanes, vocab_local, dtype=torch.float32)
        self.step_number = zeros(1, dtype=torch.float32)
        self.peer_steps = zeros(num_replicas, dtype=torch.float32)
        self.lane_ids = torch.arange(max_lanes + 1, dtype=torch.int32, device=device)
        self.output = OutputRing(ring_depth, max_lanes, device)
        self.clock = StepClock(num_timestamps, device) if num_timestamps else None

    def statics(self) -> dict[str, Tensor]:
        """Every tensor whose address a graph may have captured, by name."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return own | self.output.statics() | (self.clock.statics() if self.clock else {})

    def apply(self, edit: LaneEdit, upload: Uploader) -> None:
        """Carry out a plan's changes in a handful of device operations."""
        if edit.changes_rows:
            self._change_rows(edit, upload)
        self._write_cells(edit, upload)

    def set_step(self, step_id: int) -> None:
        """Say which step is next; the tail counts on from it."""
        self.step_number.fill_(step_id % STEP_MODULUS)

    def next_step(self) -> None:
        self.step_number.add_(1).remainder_(STEP_MODULUS)

    def set_schedule(self, query_lens: Tensor, samples: Tensor) -> None:
        """Say what each lane does from this step on, both [num_lanes]; the other lanes idle."""
        num_lanes = query_lens.shape[0]
        self.query_lens[:num_lanes].copy_(query_lens)
        self.query_lens[num_lanes:].zero_()
        self.samples[:num_lanes].copy_(samples)
        self.samples[num_lanes:].zero_()

    def set_batch(self, chunk_ids: Tensor, token_lanes: Tensor, from_chunk: Tensor) -> None:
        """Say what the tokens of a mixed step are, those of each lane together, then padding.

        Args:
            chunk_ids: [num_tokens] int64; looked at where the lane has a chunk.
            token_lanes: [num_tokens] int64, the lane of each token, 0 for padding.
            from_chunk: [num_lanes] int64, 1 where the lane computes a chunk, 0 where it decodes.
        """
        self.chunk_ids[: len(chunk_ids)].copy_(chunk_ids)
        self.token_lanes[: len(token_lanes)].copy_(token_lanes)
        self.from_chunk[: len(from_chunk)].copy_(from_chunk)

    def advance(self, token_ids: Tensor, *, counts: Tensor, active: Tensor, ended: Tensor) -> None:
        """Move lanes past the tokens they computed; those that are not ``active`` stay bit-equal.

        Args:
            counts: [num_lanes] bool, lanes that got a token.
            ended: [num_lanes] bool, lanes for which it was the last.
        """
        num_lanes = counts.shape[0]
        last_token = self.last_token[:num_lanes]
        last_token.copy_(torch.where(counts, token_ids, last_token))
        self.num_computed[:num_lanes].add_(self.query_lens[:num_lanes] * active)
        self.active[:num_lanes].copy_(active & ~ended)

    def clear(self) -> None:
        """Back to no lanes and step 0, in place: no request may see what warm-up left."""
        for tensor in self.statics().values():
            if tensor is not self.lane_ids:
                tensor.zero_()

    def keep(self) -> dict[str, Tensor]:
        """A copy on the host, by name, of all that outlives a step."""
        return {
            name: tensor.to("cpu", copy=True)
            for name, tensor in self.statics().items()
            if tensor is not self.logits
        }

    def put_back(self, kept: Mapping[str, Tensor]) -> None:
        """Restore, in place, what ``keep`` gave."""
        statics = self.statics()
        for name, tensor in kept.items():
            statics[name].copy_(tensor)

    def _change_rows(self, edit: LaneEdit, upload: Uploader) -> None:
        src, dst, resets, joined, num_computed = upload.send(
            edit.move_src, edit.move_dst, edit.resets, edit.joined, edit.joined_num_computed
        )
        if edit.move_src:
            self._move(src, dst)
        if edit.resets:
            self._reset(resets)
        if edit.joined:
            self.num_computed.index_copy_(0, joined, num_computed)
            self.active.index_fill_(0, joined, True)

    def _write_cells(self, edit: LaneEdit, upload: Uploader) -> None:
        at_once = upload.capacity // 2
        for first in range(0, len(edit.cells), at_once):
            span = slice(first, first + at_once)
            cells, ids = upload.send(edit.cells[span], edit.cell_ids[span])
            self.block_table.view(-1).index_copy_(0, cells, ids.int())

    def _lane_tensors(self) -> tuple[Tensor, ...]:
        return self.last_token, self.num_computed, self.active, self.block_table

    def _move(self, src: Tensor, dst: Tensor) -> None:
        # The last token of a lane exists only here, so lanes are compacted on the device.
        for tensor in self._lane_tensors():
            tensor.index_copy_(0, dst, tensor.index_select(0, src))

    def _reset(self, lanes: Tensor) -> None:
        for tensor in self._lane_tensors():
            tensor.index_fill_(0, lanes, 0)
