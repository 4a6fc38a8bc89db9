"""A step's blocks as FlashInfer reads them: the row starts in one list of all rows' blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.worker.forward import AttentionMetadata


class PagedLayout(NamedTuple):
    """All int32; on the host what planning looks at, on the device what the kernels read."""

    query_starts: Tensor  # host [num_reqs + 1], the last is the number of tokens with a query
    block_starts: Tensor  # host [num_reqs + 1], where each row's blocks start in ``block_ids``
    last_block_lens: Tensor  # host [num_reqs], tokens in a row's last block, 1 to block_size
    block_ids: Tensor  # device [block_starts[-1]]

    @property
    def num_tokens(self) -> int:
        """Tokens that attend; those behind are padding."""
        return int(self.query_starts[-1])


def paged_layout(metadata: AttentionMetadata, block_size: int) -> PagedLayout:
    """Bring a step's lengths to the host, which waits for the device, and gather its block ids.

    In decode form a lane that is not live has no blocks: it gets the one that it stores into.
    """
    num_reqs = len(metadata.context_lens)
    lengths = torch.cat([metadata.query_start_loc, metadata.context_lens]).cpu()
    query_starts, context_lens = lengths[: num_reqs + 1], lengths[num_reqs + 1 :]
    num_blocks = (context_lens + block_size - 1) // block_size
    block_starts = torch.cat([num_blocks.new_zeros(1), num_blocks.cumsum(0)]).int()
    block_ids = _block_ids(metadata.block_table, num_blocks, block_starts)
    if metadata.is_decode(len(metadata.slots)):
        ends = block_starts[1:].long().to(block_ids.device) - 1
        block_ids[ends] = (metadata.slots // block_size).int()
    return PagedLayout(query_starts, block_starts, (context_lens - 1) % block_size + 1, block_ids)


def _block_ids(table: Tensor, num_blocks: Tensor, block_starts: Tensor) -> Tensor:
    """The first ``num_blocks`` entries of each row of ``table``, one row after the other."""
    rows = torch.arange(len(num_blocks)).repeat_interleave(num_blocks)
    columns = torch.arange(len(rows)) - block_starts[rows]
    rows, columns = torch.stack([rows, columns]).to(table.device)
    return table[rows, columns]
