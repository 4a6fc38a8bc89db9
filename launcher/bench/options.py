"""What ``lockstep bench serve`` is asked."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lockstep.launcher import flags
from lockstep.launcher.arguments import Parser
from lockstep.launcher.config import Count
from lockstep.launcher.strict import convert

SUMMARY = "put load on a server that speaks OpenAI's API; show latencies and throughput"

Endpoint = Literal["completions", "chat"]
_Positive = Annotated[float, Meta(gt=0)]


def _help(text: str) -> Meta:
    return Meta(description=text)


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of ``lockstep bench serve``.

    Raises:
        ValueError: flags that need or exclude each other.
    """

    base_url: Annotated[str, _help("of the server")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, _help("name to ask for (default: the server's first)")] = None
    endpoint: Annotated[Endpoint, _help("which API")] = "completions"
    api_key: Annotated[str | None, _help("sent as a bearer token (or OPENAI_API_KEY)")] = None

    prompts_file: Annotated[
        str | None, _help("JSONL as 'generate' reads it, or a ShareGPT JSON; else random prompts")
    ] = None
    tokenizer: Annotated[
        str | None, _help("model directory to count a ShareGPT file's answers with, for max_tokens")
    ] = None
    num_prompts: Annotated[Count, _help("requests to send")] = 100
    input_len: Annotated[Count, _help("mean tokens of a random prompt")] = 128
    output_len: Annotated[Count, _help("max_tokens where the prompts do not say it")] = 128
    length_spread: Annotated[
        float, Meta(ge=0, lt=1), _help("random lengths are uniform in mean * (1 -+ this)")
    ] = 0.0
    vocab_size: Annotated[Count, _help("random prompts are ids below this")] = 1000
    ignore_eos: Annotated[bool, _help("ask for answers of exactly max_tokens")] = False
    temperature: Annotated[float, Meta(ge=0), _help("0 is greedy")] = 0.0

    request_rate: Annotated[
        _Positive | None, _help("requests a second, as Poisson arrivals (default: at once)")
    ] = None
    max_concurrency: Annotated[Count | None, _help("requests in flight at once")] = None
    num_warmups: Annotated[int, Meta(ge=0), _help("requests before the clock starts")] = 1
    seed: Annotated[int, _help("of prompts and arrivals")] = 0
    request_timeout: Annotated[_Positive, _help("seconds that a request may take")] = 600.0
    ready_timeout: Annotated[_Positive, _help("seconds to wait for the server")] = 600.0

    output: Annotated[str | None, _help("save the run as JSON; with --modes one file a mode")] = (
        None
    )
    plot: Annotated[str | None, _help("draw the latencies to a PNG file; needs matplotlib")] = None
    compare: Annotated[tuple[str, ...], _help("runs to put side by side; sends nothing")] = ()
    modes: Annotated[
        str | None, _help("model to serve here eagerly, PIECEWISE and FULL_AND_PIECEWISE in turn")
    ] = None
    serve_args: Annotated[str | None, _help("more flags of 'serve' for --modes, as one text")] = (
        None
    )

    @property
    def server_url(self) -> str:
        """The base URL, whether or not it was given with /v1 as clients have it."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    def __post_init__(self) -> None:
        if not self.base_url.lower().startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, got {self.base_url}")
        if self.serve_args and self.modes is None:
            raise ValueError(f"serve_args {self.serve_args!r} needs --modes")
        if self.compare and self.modes is not None:
            raise ValueError(f"compare {' '.join(self.compare)} excludes modes {self.modes}")
        if self.prompts_file is None and self.endpoint == "chat":
            raise ValueError("endpoint chat needs --prompts-file: random prompts are token ids")


def read_options(argv: Sequence[str]) -> BenchOptions:
    """Parse and check the command line.

    Raises:
        ValueError: names the field or flag, its value and the limit.
    """
    parser = Parser(prog="lockstep bench serve", description=SUMMARY, allow_abbrev=False)
    flags.add_flags(parser, BenchOptions, skip=("compare",))
    parser.add_argument(
        "--compare", nargs="+", metavar="FILE.json", default=(),
        help="put saved runs side by side, with ratios; sends nothing",
    )  # fmt: skip
    return convert(flags.given(parser.parse_args(argv), BenchOptions), BenchOptions)
