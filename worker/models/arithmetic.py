"""Operations that a chunk of a prompt takes on one rank, from a model's shape alone. No torch."""

import msgspec

from lockstep.worker.models.footprint import Footprint


class ChunkFlops(msgspec.Struct, frozen=True):
    """Multiplications and additions, two for each pair of numbers.

    ``linear`` are those of the layers' weights: 2 x tokens x weights. ``attention`` are those of
    queries with keys and of probabilities with values: 4 x heads x head size x pairs of a token and
    one that it sees, over all layers. The logits, of one token a request, are left out.
    """

    linear: float
    attention: float

    @property
    def total(self) -> float:
        return self.linear + self.attention


def chunk_flops(footprint: Footprint, num_tokens: int, num_before: int) -> ChunkFlops:
    """Of ``num_tokens`` of a prompt that follow ``num_before`` of it."""
    config = footprint.config
    products = footprint.layer_products.values()
    weights = config.num_layers * sum(in_size * out_size for in_size, out_size in products)
    windows = (config.window(layer_id) for layer_id in range(config.num_layers))
    seen = sum(
        _num_seen(num_before + num_tokens, window) - _num_seen(num_before, window)
        for window in windows
    )
    width = footprint.heads.num_heads_local * config.head_dim
    return ChunkFlops(2 * num_tokens * weights, 4 * width * seen)


def _num_seen(num_tokens: int, window: int | None) -> int:
    """Pairs of a token and one that it sees, itself included, among the first ``num_tokens``."""
    growing = min(num_tokens, window or num_tokens)
    return growing * (growing + 1) // 2 + (num_tokens - growing) * growing
