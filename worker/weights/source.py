"""Where weights come from: tensors by name, of which a part can be read without the rest."""

from collections.abc import Collection
from typing import Protocol

from torch import Tensor


class TensorSource(Protocol):
    """Tensors under their Hugging Face names, in the checkpoint's own dtype."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, dim: int, start: int, length: int) -> Tensor:
        """``length`` rows (dim 0) or columns (dim 1) from ``start``; only these are read."""
        ...
