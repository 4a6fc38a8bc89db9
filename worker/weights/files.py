"""Which files hold a model's weights. No torch: a driver looks before any rank is started."""

from pathlib import Path

import msgspec

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def safetensors_files(directory: Path) -> list[str]:
    """Names of the files of a Hugging Face directory, in order.

    Raises:
        ValueError: it has none, or its index is damaged.
    """
    index = directory / _INDEX
    if index.exists():
        try:
            weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except msgspec.DecodeError as error:
            raise ValueError(f"cannot read {index}: {error}") from None
        return sorted(set(weight_map.values()))
    if (directory / _SINGLE).exists():
        return [_SINGLE]
    raise ValueError(f"{directory} holds neither {_SINGLE} nor {_INDEX}")


def is_gguf(path: Path, load_format: str) -> bool:
    """Whether weights are read as GGUF: "auto" goes by what the path is.

    Raises:
        ValueError: the format is not that of the path.
    """
    found = path.suffix == ".gguf"
    if load_format in ("gguf", "safetensors") and found != (load_format == "gguf"):
        kind = "a GGUF file" if found else "no GGUF file"
        raise ValueError(f"load_format {load_format} cannot read {path}, which is {kind}")
    return found


def check_weights(path: Path, load_format: str) -> None:
    """Raise ValueError if files that hold the weights are missing; names them."""
    if load_format == "dummy" or is_gguf(path, load_format):
        return
    for name in safetensors_files(path):
        if not (path / name).is_file():
            raise ValueError(f"model {path} lacks {name}, which its index names")
