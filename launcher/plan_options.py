"""What ``lockstep plan`` is asked: every flag, and what of it makes no sense together."""

import argparse
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lockstep.launcher import flags
from lockstep.launcher.arguments import Parser
from lockstep.launcher.config import Count, OptimizationLevel, check_eager
from lockstep.launcher.strict import convert
from lockstep.worker.config import GraphModeName
from lockstep.worker.graphs.grid import PerformanceMode

SUMMARY = "show which graphs a configuration captures and what padding costs; needs no GPU"

SupportName = Literal["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]
_NotNegative = Annotated[int, Meta(ge=0)]
_BELOW_ZERO = re.compile(r"-\d+:\w*")
_CAPABILITY = re.compile(r"(\d{1,2})\.(\d)")


def _help(text: str) -> Meta:
    return Meta(description=text)


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of ``lockstep plan``.

    Raises:
        ValueError: flags that need or exclude each other.
    """

    max_num_seqs: Annotated[Count, _help("requests in a batch")] = 256
    max_num_batched_tokens: Annotated[
        Count | None, _help("tokens in a step (default 8192, or --max-num-seqs if that is more)")
    ] = None
    num_speculative_tokens: Annotated[
        _NotNegative, _help("drafted tokens of a request's decode step, besides its own")
    ] = 0
    cudagraph_capture_sizes: Annotated[
        tuple[int, ...] | None, _help("sizes to capture, in tokens")
    ] = None
    max_cudagraph_capture_size: Annotated[int | None, _help("largest size of the grid")] = None
    cudagraph_mode: Annotated[
        GraphModeName | None, _help("which steps are graphs (default FULL_AND_PIECEWISE)")
    ] = None
    enforce_eager: Annotated[bool, _help("no graphs")] = False
    optimization_level: Annotated[
        OptimizationLevel | None, _help("0 to 3: the mode where --cudagraph-mode does not say it")
    ] = None
    performance_mode: Annotated[PerformanceMode, _help("how fine the grid is")] = "balanced"
    compute_capability: Annotated[str, _help("of the GPUs planned for")] = "9.0"
    lora_cases: Annotated[
        tuple[int, ...], _help("counts of active adapters with graphs of their own")
    ] = (0,)
    attention_backend: Annotated[str | None, _help("see 'lockstep backends'")] = None
    attention_support: Annotated[
        SupportName | None, _help("what attention can do in a graph (default ALWAYS)")
    ] = None
    split_points: Annotated[bool, _help("the model can be cut at attention")] = True

    batch: Annotated[Count | None, _help("tokens of a batch to look up")] = None
    batch_reqs: Annotated[Count | None, _help("its requests")] = None
    uniform_query_len: Annotated[
        _NotNegative | None, _help("tokens of each of its requests; 0: mixed")
    ] = None
    num_active_loras: Annotated[_NotNegative | None, _help("adapters active in it")] = None
    agree: tuple[str, ...] | None = None

    histogram: Annotated[
        str | None, _help("file of 'generate --batch-histogram', to fit sizes to")
    ] = None
    max_graphs: Annotated[
        Count | None, _help("sizes to fit (default: as many as the standard grid has)")
    ] = None

    model: Annotated[str | None, _help("directory, config.json, GGUF file or hub id")] = None
    gpu: Annotated[
        str | None, _help("whose memory bandwidth bounds a step of --model (default H200)")
    ] = None
    context_len: Annotated[
        Count | None,
        _help(
            "tokens that each request of --model attends to (default 1024, or what the model takes)"
        ),
    ] = None
    tensor_parallel_size: Annotated[Count | None, _help("ranks that share --model (default 1)")] = (
        None
    )

    json: Annotated[bool, _help("print one JSON object instead")] = False
    plot: Annotated[str | None, _help("draw the waste to a PNG file; needs matplotlib")] = None

    def __post_init__(self) -> None:
        check_eager(self.enforce_eager, self.cudagraph_mode)
        if self.attention_backend and self.attention_support:
            raise ValueError(
                f"attention_backend {self.attention_backend} excludes "
                f"attention_support {self.attention_support}"
            )
        if self.batch is None:
            self._refuse("needs --batch", "batch_reqs", "uniform_query_len", "num_active_loras")
        if self.histogram is None:
            self._refuse("needs --histogram", "max_graphs")
        if self.model is None:
            self._refuse("needs --model", "gpu", "context_len", "tensor_parallel_size")
        if self.agree is not None:
            self._refuse("excludes --agree", "batch", "plot", "model", "histogram")
        if self.histogram is not None and self.cudagraph_capture_sizes is not None:
            raise ValueError(
                f"histogram {self.histogram} chooses sizes itself: leave "
                f"cudagraph_capture_sizes {list(self.cudagraph_capture_sizes)} out"
            )
        capability_of(self.compute_capability)

    def _refuse(self, why: str, *fields: str) -> None:
        for field in fields:
            if getattr(self, field) is not None:
                raise ValueError(f"{field} {getattr(self, field)} {why}")

    @property
    def query_len(self) -> int:
        """Tokens of a request in a decode step."""
        return 1 + self.num_speculative_tokens


def capability_of(text: str) -> tuple[int, int]:
    """(major, minor) of "9.0".

    Raises:
        ValueError: it is no such number.
    """
    found = _CAPABILITY.fullmatch(text)
    if found is None:
        raise ValueError(f"compute_capability must be MAJOR.MINOR such as 9.0, got {text!r}")
    return int(found[1]), int(found[2])


def read_options(argv: Sequence[str]) -> PlanOptions:
    """Parse and check the command line.

    Raises:
        ValueError: names the field or flag, its value and the limit.
    """
    # argparse would take it for a flag.
    for text in filter(_BELOW_ZERO.fullmatch, argv):
        raise ValueError(f"agree takes TOKENS:KIND with tokens of at least 0, got {text!r}")
    parser = Parser(prog="lockstep plan", description=SUMMARY, allow_abbrev=False)
    flags.add_flags(parser, PlanOptions, skip=("agree",))
    parser.add_argument(
        "--agree", nargs="+", metavar="TOKENS:KIND", default=argparse.SUPPRESS,
        help="agreement of a lockstep group: D decode, M mixed, E eager, I idle, Z none",
    )  # fmt: skip
    return convert(flags.given(parser.parse_args(argv), PlanOptions), PlanOptions)
