"""Bytes that an operation must move between memory and the device, by its role. No torch."""

from dataclasses import dataclass

from lockstep.parallel.shard import padded_vocab
from lockstep.worker.config import ModelConfig
from lockstep.worker.models.footprint import DTYPE_BYTES, Footprint

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """A decode step on one rank: ``num_tokens`` rows are computed, ``num_reqs`` of them are real.

    What a cache may still hold from the operation before counts as moved.
    """

    footprint: Footprint
    num_reqs: int
    num_tokens: int
    context_len: int

    def bytes_of(self, role: str | None, *, gated: bool = False) -> int | None:
        """Weights, activations, keys and values that are read and written; None if unknown.

        Args:
            gated: this "gate_up" multiplies gate and up itself and writes half as much.
        """
        if role is not None and role in self._products():
            return self._product(role, gated=gated)
        elements = self._activations().get(role or "")
        if elements is not None:
            return elements * self._element
        if role == "attention":
            return self._attention()
        if role == "scores":
            return self.num_tokens * self._vocab * _FLOAT32
        return None

    @property
    def residual_bytes(self) -> int:
        """What a product moves besides if the residual is added in it: that, the sum, the norm."""
        return (2 * self.num_tokens + 1) * self._config.hidden_size * self._element

    def _products(self) -> dict[str, tuple[int, int]]:
        """(input, output) features of each weight."""
        lm_head = (self._config.hidden_size, self._vocab)
        return {**self.footprint.layer_products, "lm_head": lm_head}

    def _product(self, role: str, *, gated: bool) -> int:
        in_size, out_size = self._products()[role]
        written = out_size // 2 if gated and role == "gate_up" else out_size
        out_element = _FLOAT32 if role == "lm_head" else self._element
        read = in_size * out_size + self.num_tokens * in_size
        return read * self._element + self.num_tokens * written * out_element

    def _activations(self) -> dict[str, int]:
        """Elements that operations without a weight of weight read and write."""
        rows, hidden = self.num_tokens, self._config.hidden_size
        return {
            "embed": 2 * rows * hidden,
            "norm": (2 * rows + 1) * hidden,
            "add_norm": (4 * rows + 1) * hidden,
            "rope": 2 * rows * (self._q_size + self._kv_size),
            "store_kv": 4 * rows * self._kv_size,
            "silu": 3 * rows * self._inner,
        }

    def _attention(self) -> int:
        """On average over the layers: some may see a window only."""
        kv = self.num_reqs * self.footprint.kv_read_bytes(self.context_len)
        # Queries and results; keys and values of this step come in and are stored.
        own = self.num_tokens * (2 * self._q_size + 4 * self._kv_size)
        return kv // self._config.num_layers + own * self._element

    @property
    def _config(self) -> ModelConfig:
        return self.footprint.config

    @property
    def _element(self) -> int:
        return DTYPE_BYTES[self._config.dtype]

    @property
    def _inner(self) -> int:
        return self._config.intermediate_size // self.footprint.tp_size

    @property
    def _q_size(self) -> int:
        return self.footprint.heads.num_heads_local * self._config.head_dim

    @property
    def _kv_size(self) -> int:
        return self.footprint.heads.num_kv_heads_local * self._config.head_dim

    @property
    def _vocab(self) -> int:
        tp_size = self.footprint.tp_size
        return padded_vocab(self._config.vocab_size, tp_size) // tp_size
