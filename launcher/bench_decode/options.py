"""What ``lockstep bench decode`` is asked."""

from collections.abc import Sequence
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

SUMMARY = "measure a decode step through the whole product, beside what the memory allows"

# Of an answer that is judged.
GATE_PROMPT, GATE_LEN, GATE_IDS = 16, 64, 20

_MAX_MODEL_LEN = 2048
_BATCHES = (1, 8, 32, 128)


class DecodeOptions(EngineBenchOptions, frozen=True, kw_only=True):
    """The flags of ``lockstep bench decode`` beside those of an engine.

    Raises:
        ValueError: flags that need or exclude each other, or an unknown mode.
    """

    batch: Annotated[tuple[Count, ...], described("requests in a replica's batch")] = _BATCHES
    input_len: Annotated[Count, described("tokens of a prompt")] = 128
    short_len: Annotated[Count, described("tokens of the shorter of two answers")] = 16
    long_len: Annotated[Count, described("of the longer one: a step is the difference")] = 144
    gate: Annotated[bool, described("hold answers against the model in plain torch")] = True

    def __post_init__(self) -> None:
        if self.long_len <= self.short_len:
            raise ValueError(
                f"long_len must be above short_len={self.short_len}, got {self.long_len}"
            )
        super().__post_init__()

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.input_len + max(self.long_len, GATE_LEN if self.gate else 0)

    @property
    def context_len(self) -> int:
        """What a request attends to in the middle of the steps that are measured."""
        return self.input_len + (self.short_len + self.long_len) // 2


class DecodeCommand(EngineBenchCommand, frozen=True, kw_only=True):
    """What is asked of an engine, and of the benchmark."""

    options: DecodeOptions


def parse(argv: Sequence[str]) -> DecodeCommand:
    """Read the command line, and the shape of the model that it names.

    Raises:
        ConfigError: an unknown flag, a file that cannot be written.
        ValueError: names the field, its value and the limit.
    """
    options, given = read_flags(argv, "decode", SUMMARY, DecodeOptions)
    shape = model_config_from(resolve_config(given["model"]))
    engine = _engine_defaults(options, shape) | given
    _check_room(options, engine)
    return DecodeCommand(engine=engine, options=options)


def _check_room(options: DecodeOptions, engine: dict[str, Any]) -> None:
    """A batch that cannot run at once, or to its end, would be measured as another."""
    lanes, length = engine["max_num_seqs"], engine["max_model_len"]
    if max(options.batch) > lanes:
        raise ValueError(f"batch must be at most max_num_seqs={lanes}, got {max(options.batch)}")
    if options.longest > length:
        raise ValueError(
            f"input_len={options.input_len} and answers of up to "
            f"{options.longest - options.input_len} tokens need {options.longest}, but "
            f"max_model_len is {length}"
        )


def _engine_defaults(options: DecodeOptions, model: ModelConfig) -> dict[str, Any]:
    """As small as the batches need. A prefix cache would compute each prompt once only."""
    return {
        "max_num_seqs": max(options.batch),
        "max_model_len": min(max(options.longest, _MAX_MODEL_LEN), model.max_position_embeddings),
        "enable_prefix_caching": False,
        "step_timestamps": TIMESTAMPS,
    }
