"""What one forward pass gets: tokens, positions and where their keys and values live."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Row i of a batch is lane i; an idle lane has no query in a mixed step.

    Tokens beyond ``query_start_loc[-1]`` are padding. In decode form (``max_query_len`` 1) every
    row has exactly one query, so token i belongs to row i. Each step that is not replayed has an
    object of its own, by which a backend may know what it planned for.
    """

    slots: Tensor  # [num_tokens] int64; padded and idle tokens point into the padding block
    query_start_loc: Tensor  # [num_reqs + 1] int32, non-decreasing
    context_lens: Tensor  # [num_reqs] int32, this step's tokens included, at least 1
    block_table: Tensor  # [num_reqs, max_blocks_per_req] int32
    max_query_len: int  # host number
    max_context_len: int  # host upper bound; a graph bakes in max_model_len

    def is_decode(self, num_tokens: int) -> bool:
        """True in decode form: no row is idle and no token is padding."""
        return self.max_query_len == 1 and num_tokens == self.context_lens.shape[0]


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """``logit_rows`` is None in decode form: then every row of the hidden state is wanted."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    logit_rows: Tensor | None  # [num_reqs] int64: the hidden row whose logits a lane wants
