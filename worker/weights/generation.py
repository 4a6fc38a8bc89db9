"""What a model's files say about generating: its end tokens and its sampling defaults. No torch."""

from pathlib import Path
from typing import TypeVar

import msgspec

_Found = TypeVar("_Found", bound="_EndTokens")


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """None where the files say nothing. ``temperature`` is 0 where they say not to sample."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class _EndTokens(msgspec.Struct):
    """What is read of ``config.json``."""

    eos_token_id: int | list[int] | None = None

    def ids(self) -> list[int]:
        value = self.eos_token_id
        if value is None:
            return []
        return [value] if isinstance(value, int) else value


class _Generation(_EndTokens):
    """What is read of ``generation_config.json``."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_defaults(path: str | Path) -> GenerationDefaults:
    """Read a Hugging Face directory or a GGUF file.

    End tokens are those of both files: a chat model may end with either.

    Raises:
        ValueError: a file is damaged.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from lockstep.worker.weights.gguf_metadata import gguf_end_tokens, open_gguf

        return GenerationDefaults(eos_token_ids=gguf_end_tokens(open_gguf(path)))
    generation = _read(path / "generation_config.json", _Generation)
    ends = [*generation.ids(), *_read(path / "config.json", _EndTokens).ids()]
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(ends)),
        temperature=0.0 if generation.do_sample is False else generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        min_p=generation.min_p,
        repetition_penalty=generation.repetition_penalty,
    )


def _read(path: Path, kind: type[_Found]) -> _Found:
    if not path.is_file():
        return kind()
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
