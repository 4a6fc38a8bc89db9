"""The shape of a model from the files it comes in. No torch."""

from pathlib import Path

from lockstep.worker.config import ModelConfig


def model_config_from(path: str | Path) -> ModelConfig:
    """Read ``config.json`` of a Hugging Face directory, or the metadata of a GGUF file.

    Raises:
        ValueError: no such model, or one that is not supported; names what and where.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from lockstep.worker.weights.gguf_metadata import gguf_model_config, open_gguf

        return gguf_model_config(open_gguf(path))
    from lockstep.worker.weights.hf_config import read_hf_config

    return read_hf_config(path)
