"""Batches over a scattered block table, with the dense keys and values they stand for."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.worker.attention.base import AttentionSizes
from lockstep.worker.forward import AttentionMetadata
from lockstep.worker.kv_cache import KVCache, KVLayout


@dataclass
class PagedCase:
    """Row i has ``contexts[i]`` tokens, of which the last ``query_lens[i]`` are this step's."""

    q: Tensor
    k: Tensor
    v: Tensor
    metadata: AttentionMetadata
    dense: list[tuple[Tensor, Tensor]]
    cache: KVCache
    query_lens: list[int]
    contexts: list[int]

    def sizes(self) -> AttentionSizes:
        layout = self.cache.layout
        return AttentionSizes(
            num_heads=self.q.shape[1],
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            max_num_reqs=len(self.contexts),
            max_num_tokens=self.q.shape[0],
            max_model_len=self.metadata.max_context_len,
            dtype=self.q.dtype,
            device=self.q.device,
        )

    def alone(self, row: int) -> "PagedCase":
        """The same cache, and of the batch this row only."""
        begin, end = self.metadata.query_start_loc[row : row + 2].tolist()
        tokens, rows = slice(begin, end), slice(row, row + 1)
        metadata = replace(
            self.metadata,
            slots=self.metadata.slots[tokens],
            query_start_loc=self.metadata.query_start_loc[row : row + 2] - begin,
            context_lens=self.metadata.context_lens[rows],
            block_table=self.metadata.block_table[rows],
            max_query_len=end - begin,
        )
        return replace(
            self, q=self.q[tokens], k=self.k[tokens], v=self.v[tokens], metadata=metadata,
            dense=self.dense[rows], query_lens=self.query_lens[rows], contexts=self.contexts[rows],
        )  # fmt: skip

    def expected(self, scale: float, window: int | None) -> Tensor:
        """Token by token, over the dense keys and values."""
        out = torch.zeros_like(self.q, dtype=torch.float32)
        token = 0
        for row, length in enumerate(self.query_lens):
            k, v = self.dense[row]
            for i in range(length):
                end = self.contexts[row] - length + i + 1
                begin = 0 if window is None else max(0, end - window)
                out[token] = attend_one(self.q[token], k[begin:end], v[begin:end], scale)
                token += 1
        return out


def attend_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query [num_heads, head_dim] over all of k and v, in float32."""
    group = q.shape[0] // k.shape[1]
    rows = []
    for head in range(q.shape[0]):
        scores = k[:, head // group].float() @ q[head].float() * scale
        rows.append(scores.softmax(0) @ v[:, head // group].float())
    return torch.stack(rows)


def make_case(
    query_lens: list[int],
    contexts: list[int],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_padding_tokens: int = 0,
    spare_blocks: int = 3,
    max_context: int = 0,
) -> PagedCase:
    """All slots outside live contexts hold NaN; blocks are handed out in random order."""
    torch.manual_seed(sum(contexts) + 31 * len(contexts))
    blocks_per_row = [-(-context // block_size) for context in contexts]
    num_blocks = 1 + sum(blocks_per_row) + spare_blocks
    layout = KVLayout(1, block_size, num_kv_heads, head_dim, dtype)
    cache = KVCache.allocate(layout, num_blocks, torch.device(device))
    cache.storage[1:].fill_(float("nan"))
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    width = max(max(blocks_per_row) + 2, -(-max_context // block_size))
    table = torch.zeros(len(contexts), width, dtype=torch.int32)
    dense, new_k, new_v, slots = [], [], [], []
    for row, (length, context) in enumerate(zip(query_lens, contexts, strict=True)):
        ids = [free.pop() for _ in range(blocks_per_row[row])]
        table[row, : len(ids)] = torch.tensor(ids)
        k, v = (
            torch.randn(context, num_kv_heads, head_dim, device=device).to(dtype) for _ in range(2)
        )
        dense.append((k, v))
        row_slots = [ids[i // block_size] * block_size + i % block_size for i in range(context)]
        _fill(cache, row_slots[: context - length], k, v)
        new_k.append(k[context - length :])
        new_v.append(v[context - length :])
        slots += row_slots[context - length :]
    padding = torch.randn(num_padding_tokens, num_kv_heads, head_dim).to(device, dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    num_tokens = int(starts[-1]) + num_padding_tokens
    metadata = AttentionMetadata(
        slots=torch.tensor(slots + [0] * num_padding_tokens, dtype=torch.int64, device=device),
        query_start_loc=starts.to(device, torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_table=table.to(device),
        max_query_len=max(query_lens),
        max_context_len=width * block_size,
    )
    return PagedCase(
        q=torch.randn(num_tokens, num_heads, head_dim).to(device, dtype),
        k=torch.cat([*new_k, padding]),
        v=torch.cat([*new_v, padding]),
        metadata=metadata,
        dense=dense,
        cache=cache,
        query_lens=query_lens,
        contexts=contexts,
    )


def _fill(cache: KVCache, slots: list[int], k: Tensor, v: Tensor) -> None:
    places = torch.tensor(slots, dtype=torch.int64, device=k.device)
    where = (places // cache.block_size, places % cache.block_size)
    for layer, new in zip(cache.layer(0), (k, v), strict=True):
        layer[where] = new[: len(slots)]
