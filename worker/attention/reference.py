"""Attention in plain torch and float32: what runs on a CPU, and the oracle of faster backends."""

import torch
from torch import Tensor

from lockstep.worker.attention.base import AttentionSizes
from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.graphs.guard import unguarded
from lockstep.worker.graphs.mode import AttentionSupport
from lockstep.worker.rotation import Rotation

_GATHER_BYTES = 64 << 20
_QUERIES_PER_PASS = 512


class ReferenceAttention:
    """Rows with one query are attended to together; longer ones (prompt chunks) row by row."""

    name = "reference"
    support = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE  # the rest looks at lengths on the host

    def __init__(self, sizes: AttentionSizes) -> None:
        token_bytes = 4 * sizes.num_kv_heads * sizes.head_dim
        self._tokens_per_gather = max(1, _GATHER_BYTES // token_bytes)

    def rotates(self, metadata: AttentionMetadata, num_tokens: int) -> bool:
        return False

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer_kv: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
        rotation: Rotation | None = None,
        out: Tensor,
    ) -> None:
        _store(k, v, layer_kv, metadata.slots)
        if metadata.is_decode(q.shape[0]):
            self._decode(q, layer_kv, metadata, scale, window, out)
            return
        self._mixed(q, layer_kv, metadata, scale, window, out)

    def _mixed(
        self,
        q: Tensor,
        layer_kv: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        out.zero_()
        starts = metadata.query_start_loc.tolist()
        contexts = metadata.context_lens.tolist()
        lens = [end - start for start, end in zip(starts, starts[1:], strict=False)]
        singles = [row for row, length in enumerate(lens) if length == 1]
        if singles:
            rows = torch.tensor(singles, device=q.device)
            tokens = metadata.query_start_loc[rows].long()
            single_out = torch.empty_like(q[: len(singles)])
            self._decode(q[tokens], layer_kv, _rows(metadata, rows), scale, window, single_out)
            out[tokens] = single_out
        for row, length in enumerate(lens):
            if length > 1:
                span = slice(starts[row], starts[row + 1])
                table = metadata.block_table[row]
                _prefill(q[span], layer_kv, table, contexts[row], scale, window, out[span])

    def _decode(
        self,
        q: Tensor,
        layer_kv: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        longest = _longest_context(metadata)
        step = max(1, self._tokens_per_gather // longest)
        for first in range(0, q.shape[0], step):
            rows = slice(first, first + step)
            contexts, table = metadata.context_lens[rows], metadata.block_table[rows]
            out[rows] = _decode_rows(q[rows], layer_kv, table, contexts, longest, scale, window)


def _store(k: Tensor, v: Tensor, layer_kv: tuple[Tensor, Tensor], slots: Tensor) -> None:
    block_size = layer_kv[0].shape[1]
    where = (slots // block_size, slots % block_size)
    for cache, new in zip(layer_kv, (k, v), strict=True):
        cache.index_put_(where, new.to(cache.dtype))


def _longest_context(metadata: AttentionMetadata) -> int:
    """On CUDA the host number, so that nothing waits for the device; on a CPU the real one."""
    if metadata.context_lens.is_cuda:
        return metadata.max_context_len
    with unguarded():
        return int(metadata.context_lens.max())


def _rows(metadata: AttentionMetadata, rows: Tensor) -> AttentionMetadata:
    return AttentionMetadata(
        slots=metadata.slots,
        query_start_loc=metadata.query_start_loc,
        context_lens=metadata.context_lens[rows],
        block_table=metadata.block_table[rows],
        max_query_len=1,
        max_context_len=metadata.max_context_len,
    )


def _gather(cache: Tensor, table: Tensor, num_tokens: int) -> Tensor:
    """[num_rows, num_tokens, num_kv_heads, head_dim] float32 of the rows' first tokens."""
    block_size = cache.shape[1]
    blocks = cache[table[:, : -(-num_tokens // block_size)].long()]
    return blocks.flatten(1, 2)[:, :num_tokens].float()


def _decode_rows(
    q: Tensor,
    layer_kv: tuple[Tensor, Tensor],
    table: Tensor,
    contexts: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    k, v = (_gather(cache, table, longest) for cache in layer_kv)
    num_rows, _, num_kv_heads, head_dim = k.shape
    positions = torch.arange(longest, device=q.device)
    dead = positions >= contexts.unsqueeze(1)
    if window is not None:
        dead |= positions < contexts.unsqueeze(1) - window
    # A weight of 0 does not hide a NaN value: dead values must be numbers.
    v.masked_fill_(dead[:, :, None, None], 0.0)
    queries = q.float().view(num_rows, num_kv_heads, -1, head_dim)
    scores = queries @ k.permute(0, 2, 3, 1) * scale
    scores.masked_fill_(dead[:, None, None, :], float("-inf"))
    attended = scores.softmax(-1) @ v.permute(0, 2, 1, 3)
    return attended.view_as(q).to(q.dtype)


def _prefill(
    q: Tensor,
    layer_kv: tuple[Tensor, Tensor],
    table: Tensor,
    context: int,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    k, v = (_gather(cache, table.unsqueeze(0), context)[0] for cache in layer_kv)
    first_position = context - q.shape[0]
    for first in range(0, q.shape[0], _QUERIES_PER_PASS):
        queries = q[first : first + _QUERIES_PER_PASS]
        start = first_position + first
        low = 0 if window is None else max(0, start - window + 1)
        high = start + queries.shape[0]
        out[first : first + _QUERIES_PER_PASS] = _attend(
            queries, k[low:high], v[low:high], start - low, scale, window
        )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int | None
) -> Tensor:
    """Queries at ``start``, ``start + 1``, ... of the keys given."""
    num_queries, num_kv_heads = q.shape[0], k.shape[1]
    at = torch.arange(start, start + num_queries, device=q.device).unsqueeze(1)
    positions = torch.arange(k.shape[0], device=q.device)
    hidden = positions > at
    if window is not None:
        hidden |= positions <= at - window
    queries = q.float().view(num_queries, num_kv_heads, -1, q.shape[-1]).permute(1, 2, 0, 3)
    scores = queries @ k.permute(1, 2, 0).unsqueeze(1) * scale
    scores.masked_fill_(hidden, float("-inf"))
    attended = scores.softmax(-1) @ v.transpose(0, 1).unsqueeze(1)
    return attended.permute(2, 0, 1, 3).reshape_as(q).to(q.dtype)
