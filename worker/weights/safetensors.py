"""Weights in safetensors files: one, or several with an index."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.worker.weights.files import safetensors_files


class SafetensorsSource:
    """The tensors of a Hugging Face directory, read through memory maps.

    Raises:
        ValueError: the directory has no safetensors, or a file of its index is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._tensors: dict[str, Any] = {}
        for name in safetensors_files(directory):
            file = _open(directory / name)
            self._tensors |= dict.fromkeys(file.keys(), file)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].get_slice(name).get_shape())

    def read(self, name: str, dim: int, start: int, length: int) -> Tensor:
        part = self._tensors[name].get_slice(name)
        stop = start + length
        tensor: Tensor = part[start:stop] if dim == 0 else part[:, start:stop]
        return tensor


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
