"""How the heads of queries and keys are turned by the position of their token."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotated pair of dims is (i, i + head_dim / 2)."""

    cos_sin: Tensor  # [max_positions, head_dim] float32: cosines, then sines
    weights: tuple[Tensor, Tensor] | None  # [head_dim] of the q and the k norm that come first
    eps: float  # of these norms
