"""What ``lockstep bench decode`` is asked."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from lockstep.launcher import flags
from lockstep.launcher.arguments import Parser
from lockstep.launcher.config import Count, LaunchConfig, build_config
from lockstep.launcher.files import check_writable
from lockstep.launcher.strict import convert, suggestion
from lockstep.worker.config import GraphModeName, ModelConfig
from lockstep.worker.weights.model_config import model_config_from
from lockstep.worker.weights.resolve import resolve_config

SUMMARY = "measure a decode step through the whole product, beside what the memory allows"

# Of an answer that is judged.
GATE_PROMPT, GATE_LEN, GATE_IDS = 16, 64, 20

_MODES: dict[str, dict[str, Any]] = {"eager": {"enforce_eager": True}} | {
    name.lower(): {"cudagraph_mode": name} for name in get_args(GraphModeName) if name != "NONE"
}
_TIMESTAMPS = 4096
_MAX_MODEL_LEN = 2048


def _help(text: str) -> Meta:
    return Meta(description=text)


class DecodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of ``lockstep bench decode`` beside those of an engine.

    Raises:
        ValueError: flags that need or exclude each other, or an unknown mode.
    """

    batch: Annotated[tuple[Count, ...], _help("requests in a replica's batch")] = (1, 8, 32, 128)
    input_len: Annotated[Count, _help("tokens of a prompt")] = 128
    short_len: Annotated[Count, _help("tokens of the shorter of two answers")] = 16
    long_len: Annotated[Count, _help("of the longer one: a step is the difference")] = 144
    repetitions: Annotated[Count, _help("of each batch")] = 5
    modes: Annotated[
        str, _help("graph modes in turn, such as eager,full_and_piecewise (default: the engine's)")
    ] = ""
    ray: Annotated[bool, _help("ranks as Ray actors; else as child processes")] = True
    compare_no_ray: Annotated[bool, _help("first with Ray, then without")] = False
    gate: Annotated[bool, _help("hold answers against the model in plain torch")] = True
    json: Annotated[str | None, _help("write all of it there")] = None

    def __post_init__(self) -> None:
        if self.long_len <= self.short_len:
            raise ValueError(
                f"long_len must be above short_len={self.short_len}, got {self.long_len}"
            )
        if self.compare_no_ray and not self.ray:
            raise ValueError("compare_no_ray needs a run with Ray to compare with, got --no-ray")
        for name in self.mode_names:
            if name and name not in _MODES:
                raise ValueError(f"modes: {name!r} is not known{suggestion(name, list(_MODES))}")

    @property
    def launchers(self) -> tuple[str, ...]:
        """In the order of their runs."""
        return (("ray",) if self.ray else ()) + (
            ("processes",) if self.compare_no_ray or not self.ray else ()
        )

    @property
    def mode_names(self) -> tuple[str, ...]:
        """As ``mode_settings`` knows them; "" is whatever the engine is told."""
        return tuple(name.strip().lower() for name in self.modes.split(","))

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.input_len + max(self.long_len, GATE_LEN if self.gate else 0)

    @property
    def context_len(self) -> int:
        """What a request attends to in the middle of the steps that are measured."""
        return self.input_len + (self.short_len + self.long_len) // 2


class DecodeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed and checked command line; ``engine`` are fields of ``LaunchConfig``."""

    engine: dict[str, Any]
    options: DecodeOptions

    def launch(self, mode: str) -> LaunchConfig:
        """Settings of an engine in that graph mode. Raises ConfigError if they cannot work."""
        return build_config(self.engine | (_MODES[mode] if mode else {}))


def parse(argv: Sequence[str]) -> DecodeCommand:
    """Read the command line, and the shape of the model that it names.

    Raises:
        ConfigError: an unknown flag, a file that cannot be written.
        ValueError: names the field, its value and the limit.
    """
    namespace = _parser().parse_args(argv)
    options = convert(flags.given(namespace, DecodeOptions), DecodeOptions)
    if options.json is not None:
        check_writable("--json", Path(options.json))
    given = flags.given(namespace, LaunchConfig)
    if "model" not in given:
        raise ValueError("model is required: pass --model")
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
        "step_timestamps": _TIMESTAMPS,
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="lockstep bench decode", description=SUMMARY, allow_abbrev=False)
    flags.add_flags(parser, DecodeOptions)
    flags.add_flags(parser.add_argument_group("engine"), LaunchConfig)
    return parser
