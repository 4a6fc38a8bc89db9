"""What ``lockstep bench prefill`` is asked."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

from lockstep.launcher.bench_engine.options import (
    TIMESTAMPS,
    EngineBenchCommand,
    EngineBenchOptions,
    described,
    read_flags,
)
from lockstep.launcher.config import Count
from lockstep.worker.config import ModelConfig
from lockstep.worker.weights.model_config import model_config_from
from lockstep.worker.weights.resolve import resolve_config

SUMMARY = "measure a chunk of a prompt through the whole product, beside the rate of products"

_CHUNK_SIZE = 2048
_NUM_CHUNKS = (1, 2, 4, 8)


class PrefillOptions(EngineBenchOptions, frozen=True, kw_only=True):
    """The flags of ``lockstep bench prefill`` beside those of an engine.

    Raises:
        ValueError: flags that exclude each other, or prompts that do not rise.
    """

    num_chunks: Annotated[
        tuple[Count, ...],
        described("of prompts, rising: a row is what a prompt takes more than the one before"),
    ] = _NUM_CHUNKS

    def __post_init__(self) -> None:
        if len(self.num_chunks) < 2 or any(more <= less for less, more in self.spans):
            given = " ".join(map(str, self.num_chunks))
            raise ValueError(f"num_chunks must be two or more rising numbers, got {given}")
        super().__post_init__()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Chunks of the shorter and of the longer prompt of each row."""
        return tuple(pairwise(self.num_chunks))


class PrefillCommand(EngineBenchCommand, frozen=True, kw_only=True):
    """What is asked of an engine, and of the benchmark."""

    options: PrefillOptions

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk: as many as a step takes."""
        size: int = self.engine["max_num_batched_tokens"]
        return size


def parse(argv: Sequence[str]) -> PrefillCommand:
    """Read the command line, and the shape of the model that it names.

    Raises:
        ConfigError: an unknown flag, a file that cannot be written.
        ValueError: names the field, its value and the limit.
    """
    options, given = read_flags(argv, "prefill", SUMMARY, PrefillOptions)
    shape = model_config_from(resolve_config(given["model"]))
    chunk_size = given.get("max_num_batched_tokens", _CHUNK_SIZE)
    longest = options.num_chunks[-1] * chunk_size + 1
    engine = _engine_defaults(shape, chunk_size, longest) | given
    limit = engine["max_model_len"]
    if longest > limit:
        raise ValueError(
            f"num_chunks={options.num_chunks[-1]} of {chunk_size} tokens and one of an answer "
            f"need {longest}, but max_model_len is {limit}"
        )
    return PrefillCommand(engine=engine, options=options)


def _engine_defaults(model: ModelConfig, chunk_size: int, longest: int) -> dict[str, Any]:
    """As small as one prompt needs. No prefix of it is to be found in a cache."""
    return {
        "max_num_batched_tokens": chunk_size,
        "max_num_seqs": 1,
        "max_model_len": min(longest, model.max_position_embeddings),
        "enable_prefix_caching": False,
        "step_timestamps": TIMESTAMPS,
    }
