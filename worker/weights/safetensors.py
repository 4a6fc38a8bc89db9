"""Weights in safetensors files: one, or several with an index."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class SafetensorsSource:
    """The tensors of a Hugging Face directory, read through memory maps.

    Raises:
        ValueError: the directory has no safetensors, or a file of its index is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._tensors: dict[str, Any] = {}
        for name in _file_names(directory):
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


def _file_names(directory: Path) -> list[str]:
    index = directory / _INDEX
    if index.exists():
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        return sorted(set(weight_map.values()))
    if (directory / _SINGLE).exists():
        return [_SINGLE]
    raise ValueError(f"{directory} holds neither {_SINGLE} nor {_INDEX}")
