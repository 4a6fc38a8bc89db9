"""The reference attention without a look at the host: what a graph of any batch needs of a backend.

Every token is a row of its own: it sees its request's context up to itself.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lockstep.worker.attention.reference import ReferenceAttention
from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.graphs.mode import AttentionSupport


class AlwaysAttention(ReferenceAttention):
    support = AttentionSupport.ALWAYS

    def _mixed(
        self,
        q: Tensor,
        layer_kv: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        starts = metadata.query_start_loc
        tokens = torch.arange(len(q), dtype=starts.dtype)
        rows = torch.searchsorted(starts[1:], tokens, right=True)
        live = (tokens < starts[-1]).unsqueeze(1)
        rows = rows.clamp(max=len(starts) - 2)
        contexts = metadata.context_lens[rows] - (starts[rows + 1] - 1 - tokens)
        alone = replace(
            metadata,
            context_lens=torch.where(live[:, 0], contexts, 1).int(),
            block_table=torch.where(live, metadata.block_table[rows], 0),
        )
        self._decode(q, layer_kv, alone, scale, window, out)
        out.masked_fill_(~live.unsqueeze(2), 0.0)
