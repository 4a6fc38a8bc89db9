"""The blocks of a step in FlashInfer's order, against the rows they came from."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.worker.attention.paged_layout import paged_layout
from lockstep.worker.forward import AttentionMetadata


def _metadata(rows: list[tuple[int, int]], block_size: int, spare: int = 2) -> AttentionMetadata:
    """``rows`` are (query_len, context); block ids are distinct and tell their row and place."""
    query_lens, contexts = zip(*rows, strict=True)
    width = -(-max(contexts) // block_size) + spare
    return AttentionMetadata(
        slots=torch.zeros(sum(query_lens), dtype=torch.int64),
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_table=torch.arange(1, len(rows) * width + 1, dtype=torch.int32).view(-1, width),
        max_query_len=max(2, *query_lens),
        max_context_len=width * block_size,
    )


@st.composite
def _rows(draw: st.DrawFn) -> list[tuple[int, int]]:
    contexts = draw(st.lists(st.integers(1, 70), min_size=1, max_size=9))
    return [(draw(st.integers(0, context)), context) for context in contexts]


@given(rows=_rows(), block_size=st.sampled_from([1, 4, 16, 64]))
def test_every_row_keeps_its_blocks_its_length_and_its_queries(
    rows: list[tuple[int, int]], block_size: int
) -> None:
    metadata = _metadata(rows, block_size)
    layout = paged_layout(metadata, block_size)
    starts = layout.block_starts.tolist()
    assert layout.query_starts.tolist() == metadata.query_start_loc.tolist()
    assert layout.num_tokens == sum(query_len for query_len, _ in rows)
    assert starts[0] == 0 and starts[-1] == len(layout.block_ids)
    for row, (_, context) in enumerate(rows):
        ids = layout.block_ids[starts[row] : starts[row + 1]]
        assert ids.tolist() == metadata.block_table[row, : len(ids)].tolist()
        assert 1 <= layout.last_block_lens[row] <= block_size
        assert (len(ids) - 1) * block_size + layout.last_block_lens[row] == context


def test_all_numbers_are_int32_and_what_is_planned_with_is_on_the_host() -> None:
    layout = paged_layout(_metadata([(2, 5), (0, 1)], 4), 4)
    assert {tensor.dtype for tensor in layout} == {torch.int32}
    assert {tensor.device.type for tensor in layout[:3]} == {"cpu"}


def test_in_decode_form_a_lane_without_blocks_has_the_one_it_stores_into() -> None:
    metadata = AttentionMetadata(
        slots=torch.tensor([4 * 6 + 1, 0]),
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        context_lens=torch.tensor([6, 1], dtype=torch.int32),
        block_table=torch.tensor([[5, 6, 0], [9, 9, 9]], dtype=torch.int32),
        max_query_len=1,
        max_context_len=12,
    )
    assert paged_layout(metadata, 4).block_ids.tolist() == [5, 6, 0]
