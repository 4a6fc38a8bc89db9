"""Random weights made from a config alone, for measuring without a checkpoint."""

from collections.abc import Collection, Mapping
from hashlib import blake2b

import torch
from torch import Tensor


class DummySource:
    """Normal weights of deviation ``std``; those of norms lie around one.

    Each whole tensor is drawn on the device from a generator seeded by ``seed`` and its name, then
    cut: a rank of any number of ranks sees the same model. Values differ between device types.

    Args:
        shapes: whole shape of every tensor by name.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        std: float,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._shapes = shapes
        self._std = std
        self._seed = seed
        self._device = device
        self._dtype = dtype

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, dim: int, start: int, length: int) -> Tensor:
        digest = blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest) >> 1)
        tensor = torch.empty(self._shapes[name], device=self._device, dtype=self._dtype)
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        return tensor.normal_(mean, self._std, generator=generator).narrow(dim, start, length)
