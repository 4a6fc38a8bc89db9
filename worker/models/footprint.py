"""Bytes that a decode step reads on one rank, from a model's shape alone. No torch."""

from dataclasses import dataclass

from lockstep.parallel.shard import HeadLayout, padded_vocab, split_range
from lockstep.worker.config import Dtype, ModelConfig

DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one of ``tp_size`` ranks holds and reads, in the model's own dtype.

    Raises:
        ValueError: the model cannot be split so.
    """

    config: ModelConfig
    tp_size: int = 1

    def __post_init__(self) -> None:
        HeadLayout(self.config.num_heads, self.config.num_kv_heads, self.tp_size)
        split_range(self.config.intermediate_size, self.tp_size, 0, what="intermediate_size")

    @property
    def step_weight_bytes(self) -> int:
        """Weights that every step reads: the layers, the last norm and the LM head.

        Of an embedding a step reads a row for each token, which is left out.
        """
        layers = self.config.num_layers * self._layer_elements()
        return self._bytes(layers + self.config.hidden_size + self._vocab_elements())

    @property
    def weight_bytes(self) -> int:
        """Weights that lie in memory."""
        embedding = 0 if self.config.tie_embeddings else self._bytes(self._vocab_elements())
        return self.step_weight_bytes + embedding

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return self.config.num_layers * self._layer_kv_bytes()

    def kv_read_bytes(self, context_len: int) -> int:
        """Keys and values that one request's decode step reads at that length."""
        windows = (self.config.window(layer_id) for layer_id in range(self.config.num_layers))
        seen = sum(min(context_len, window or context_len) for window in windows)
        return seen * self._layer_kv_bytes()

    @property
    def heads(self) -> HeadLayout:
        """Which of the heads a rank has, those that fill it up included."""
        return HeadLayout(self.config.num_heads, self.config.num_kv_heads, self.tp_size)

    @property
    def layer_products(self) -> dict[str, tuple[int, int]]:
        """(input, output) features of each weight of a layer, in the order of their use."""
        config, heads = self.config, self.heads
        hidden, inner = config.hidden_size, config.intermediate_size // self.tp_size
        q_size = heads.num_heads_local * config.head_dim
        kv_size = heads.num_kv_heads_local * config.head_dim
        return {
            "qkv": (hidden, q_size + 2 * kv_size),
            "o": (q_size, hidden),
            "gate_up": (hidden, 2 * inner),
            "down": (inner, hidden),
        }

    def _bytes(self, elements: int) -> int:
        return elements * DTYPE_BYTES[self.config.dtype]

    def _layer_kv_bytes(self) -> int:
        return self._bytes(2 * self.heads.num_kv_heads_local * self.config.head_dim)

    def _vocab_elements(self) -> int:
        rows = padded_vocab(self.config.vocab_size, self.tp_size) // self.tp_size
        return rows * self.config.hidden_size

    def _layer_elements(self) -> int:
        config, products, hidden = self.config, self.layer_products, self.config.hidden_size
        qkv_size, gate_up_size = products["qkv"][1], products["gate_up"][1]
        weights = sum(in_size * out_size for in_size, out_size in products.values())
        norms = 2 * hidden + 2 * config.head_dim * config.qk_norm
        mlp_bias = (gate_up_size + hidden) * config.mlp_bias
        biases = qkv_size * config.qkv_bias + hidden * config.o_bias + mlp_bias
        return weights + norms + biases
