"""What passes from one segment of a forward pass to the next, at addresses that never change."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lockstep.worker.forward import ForwardInputs


@dataclass(frozen=True, slots=True)
class Flow:
    """Allocated once at the largest size; a step of fewer tokens uses the first rows of each.

    Segments and attentions write whole rows, padding included, so a row holds nothing of an
    earlier step when it is read.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    heads: Tensor  # [num_tokens, query, key and value heads, head_dim]
    attended: Tensor  # [num_tokens, query heads, head_dim]
    residual: Tensor  # [num_tokens, hidden_size]
    hidden: Tensor  # [num_tokens, hidden_size], what the last segment leaves

    @staticmethod
    def create(
        num_tokens: int,
        *,
        hidden_size: int,
        num_heads: int,
        num_all_heads: int,
        head_dim: int,
        like: Tensor,
    ) -> "Flow":
        """Zeros of the type and on the device of ``like``."""

        def ids() -> Tensor:
            return torch.zeros(num_tokens, dtype=torch.int64, device=like.device)

        return Flow(
            token_ids=ids(),
            positions=ids(),
            heads=like.new_zeros(num_tokens, num_all_heads, head_dim),
            attended=like.new_zeros(num_tokens, num_heads, head_dim),
            residual=like.new_zeros(num_tokens, hidden_size),
            hidden=like.new_zeros(num_tokens, hidden_size),
        )

    def first(self, num_tokens: int) -> "Flow":
        """Views of the first rows."""
        return Flow(*(tensor[:num_tokens] for tensor in self._tensors()))

    def load(self, inputs: ForwardInputs) -> None:
        """Take a step's tokens, as many as there are rows."""
        self.token_ids.copy_(inputs.token_ids)
        self.positions.copy_(inputs.positions)

    def statics(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        names = (f"flow_{field.name}" for field in fields(self))
        return dict(zip(names, self._tensors(), strict=True))

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]
