"""What ``lockstep profile`` is asked: flags of its own, and those of a worker that it takes."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from lockstep.launcher import flags
from lockstep.launcher.arguments import Parser
from lockstep.launcher.config import Count, LaunchConfig, build_config
from lockstep.launcher.strict import convert

SUMMARY = "say what bounds a decode step on this machine, kernel by kernel"

# The rest of the engine's settings follows from the batches.
_ENGINE = (
    "model", "load_format", "dtype", "device", "seed", "tensor_parallel_size", "all_reduce",
    "distributed_timeout_seconds", "block_size", "attention_backend", "compile", "cudagraph_mode",
    "optimization_level", "performance_mode", "cudagraph_capture_sizes", "max_num_seqs",
    "gpu_memory_utilization",
)  # fmt: skip


def _help(text: str) -> Meta:
    return Meta(description=text)


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of ``lockstep profile`` beside those of the engine."""

    batch: Annotated[tuple[Count, ...], Meta(min_length=1), _help("requests in a step")] = (
        1,
        8,
        32,
    )
    input_len: Annotated[Count, _help("prompt tokens of each request")] = 128
    steps: Annotated[Count, _help("steps timed at a time")] = 20
    repetitions: Annotated[Count, _help("times that they are timed, for the median")] = 5
    rows: Annotated[Count, _help("kernels shown of each batch, the longest first")] = 20
    json: Annotated[str | None, _help("file to write everything to, as JSON")] = None
    plot: Annotated[str | None, _help("PNG file to draw the timelines to; needs matplotlib")] = None


def read_options(argv: Sequence[str]) -> tuple[ProfileOptions, LaunchConfig]:
    """Parse and check the command line.

    Raises:
        ValueError: names the field or flag, its value and the limit.
    """
    parser = Parser(prog="lockstep profile", description=SUMMARY, allow_abbrev=False)
    flags.add_flags(parser, ProfileOptions)
    others = [name for name in LaunchConfig.__struct_fields__ if name not in _ENGINE]
    flags.add_flags(parser.add_argument_group("engine"), LaunchConfig, skip=others)
    namespace = parser.parse_args(argv)
    options = convert(flags.given(namespace, ProfileOptions), ProfileOptions)
    return options, build_config(flags.given(namespace, LaunchConfig))
