"""The ``lockstep`` command.

Answers go to standard output and everything else to standard error. Exit codes: see
``launcher.errors``.
"""

import argparse
import errno
import json
import os
import signal
import stat
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import msgspec

from lockstep.comm.sampling import SamplingParams
from lockstep.launcher import flags
from lockstep.launcher.arguments import Parser
from lockstep.launcher.config import LaunchConfig, build_config
from lockstep.launcher.errors import ConfigError, LaunchError
from lockstep.launcher.front_end import StartEngine, open_front_end, start_default_engine
from lockstep.launcher.generate import (
    STDIN,
    GenerateOptions,
    answer_none,
    check_options,
    check_text,
    generate,
    has_prompts,
    report_graphs,
    summarize,
)
from lockstep.launcher.line_format import AUTO_RULE
from lockstep.launcher.progress import stages
from lockstep.launcher.start_report import late_report, start_report
from lockstep.launcher.strict import convert
from lockstep.launcher.structured import FIELD, StructureCheck
from lockstep.launcher.termination import Termination
from lockstep.launcher.version import package_version
from lockstep.launcher.whole_numbers import whole_number

INTERRUPTED = 130
UNREAD = 141
TERMINATED = 143

_SAMPLING_HELP = {
    "temperature": "0 is greedy",
    "top_p": "keep the likeliest tokens of this total probability",
    "top_k": "keep this many of the likeliest tokens; 0: all",
    "min_p": "drop tokens below this share of the likeliest one's probability",
    "max_tokens": "most new tokens of a request (256)",
    "min_tokens": "no end before this many new tokens",
    "ignore_eos": "go on after an end token",
    "stop": "texts that end an answer",
    "stop_token_ids": "token ids that end an answer",
    "include_stop_str_in_output": "leave the stop text in the answer",
    "presence_penalty": "subtracted from tokens that have occurred",
    "frequency_penalty": "subtracted once for each occurrence",
    "repetition_penalty": "divides logits of tokens of prompt and answer",
    "logprobs": "report log-probabilities, with this many alternatives",
}
# Commands that start no ranks elsewhere: what they do, and the module that is loaded for them.
_OFFLINE = {
    "plan": ("show which graphs a configuration captures", "lockstep.launcher.plan"),
    "backends": ("list attention backends", "lockstep.launcher.backends"),
    "top": ("watch a server", "lockstep.launcher.top.command"),
    "profile": ("say what bounds a decode step here", "lockstep.launcher.profile.command"),
    "bench": ("measure a server, or a step of an engine", "lockstep.launcher.bench.command"),
}
# Commands with one of their own.
_SERVING = {"serve": ("answer requests over HTTP", "lockstep.launcher.serve.command")}
# A request's own seed is set in JSONL; from --seed, the engine's, requests without one draw theirs.
_NO_FLAG = ("seed", "logit_bias", FIELD)
_AS_JSON = {"logit_bias", FIELD}


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed and checked command line."""

    launch: LaunchConfig
    options: GenerateOptions


def parse(argv: Sequence[str]) -> Command:
    """Read the command line and the files that it names as configuration.

    Raises:
        ConfigError: unknown flags, or settings that cannot work; names field, value and limit.
        SystemExit: help or the version was asked for (0).
    """
    namespace = _parser().parse_args(argv)
    file = Path(namespace.config) if namespace.config else None
    options = GenerateOptions(
        prompts=tuple(namespace.prompts),
        prompts_file=_prompts_file(namespace),
        prompts_format=namespace.prompts_format,
        output=namespace.output,
        raw=namespace.raw,
        max_concurrency=namespace.max_concurrency,
        graph_stats=namespace.graph_stats,
        batch_histogram=namespace.batch_histogram,
        sampling=_sampling(namespace),
    )
    check_options(options)
    return Command(launch=build_config(flags.given(namespace, LaunchConfig), file), options=options)


def run(command: Command, start_engine: StartEngine) -> int:
    """Start an engine, generate, end the engine; returns the exit code.

    Raises:
        LaunchError: the engine cannot start, or dies.
    """
    if not has_prompts(command.options):
        answer_none(command.options)
        return 0
    with stages() as progress:
        check = partial(check_text, command.options)
        front = open_front_end(command.launch, start_engine, progress, check)
    engine = front.engine
    try:
        for line in start_report(engine.summary()):
            sys.stderr.write(f"lockstep: {line}\n")
        totals = generate(command.options, front)
        sys.stderr.write(summarize(front.resolved, engine, totals))
        for line in late_report(engine.summary(), engine.stats()):
            sys.stderr.write(f"lockstep: {line}\n")
        report_graphs(command.options, engine)
    finally:
        engine.shutdown()
    return 1 if totals.failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the console script: engines run as Ray actors."""
    return guarded(sys.argv[1:] if argv is None else argv, start_default_engine)


def guarded(argv: Sequence[str], start_engine: StartEngine) -> int:
    """Run a command; every failure is a line on standard error and an exit code."""
    # A stream that the caller has closed is None in Python.
    sys.stdout = sys.stdout or _unread_output()
    sys.stderr = sys.stderr or open(os.devnull, "w")
    terminated = Termination()
    signal.signal(signal.SIGTERM, terminated)
    try:
        _check_arguments(argv)
        return _dispatch(argv, start_engine)
    except LaunchError as error:
        sys.stderr.write(f"lockstep: {error}\n")
        return error.exit_code
    except BrokenPipeError:
        # Who read the answers has left. Nothing may be flushed to it any more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stderr.write("lockstep: no space is left where the output goes\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"lockstep: {'terminated' if terminated.came else 'interrupted'}\n")
        return TERMINATED if terminated.came else INTERRUPTED


def _check_arguments(argv: Sequence[str]) -> None:
    """Raises ConfigError for one that is not UTF-8, which Ray could not pass on."""
    for number, argument in enumerate(argv, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"argument {number} is not valid UTF-8: {argument!a}") from None


def _unread_output() -> TextIO:
    """In place of a standard output that the caller has closed: nobody reads what is written."""
    reader, writer = os.pipe()
    # As descriptor 1, or a file that is opened later would become it. Programs started from here
    # find it closed, as before.
    os.dup2(writer, 1, inheritable=False)
    for each in {reader, writer} - {1}:
        os.close(each)
    return TextIOWrapper(open(1, "wb", buffering=0, closefd=False), write_through=True)


def _dispatch(argv: Sequence[str], start_engine: StartEngine) -> int:
    if argv and argv[0] in _OFFLINE:
        code: int = import_module(_OFFLINE[argv[0]][1]).main(argv[1:])
        return code
    if argv and argv[0] in _SERVING:
        served: int = import_module(_SERVING[argv[0]][1]).main(argv[1:], start_engine)
        return served
    return run(parse(argv), start_engine)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="lockstep", description="Large language models on ranks that step together."
    )
    parser.add_argument("--version", action="version", version=f"lockstep {package_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="answer prompts", allow_abbrev=False))
    for name, (text, _) in (_SERVING | _OFFLINE).items():
        commands.add_parser(name, help=text)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts to answer")
    parser.add_argument("--config", metavar="FILE", help="TOML file of engine settings")
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="a prompt a line, or JSONL; '-' or nothing at all: standard input",
    )
    parser.add_argument(
        "--prompts-format", choices=("auto", "text", "jsonl"), default="auto", help=AUTO_RULE
    )
    parser.add_argument(
        "--output", metavar="FILE.jsonl", help="write answers there, in order; '-': standard output"
    )
    parser.add_argument("--raw", action="store_true", help="leave the chat template out")
    parser.add_argument(
        "--max-concurrency", type=whole_number, metavar="N", help="requests in flight at once"
    )
    parser.add_argument(
        "--graph-stats", action="store_true", help="a table of the graphs replayed, at the end"
    )
    parser.add_argument(
        "--batch-histogram", metavar="FILE", help="write {num_tokens: steps} there, for plan"
    )
    engine = parser.add_argument_group("engine")
    # Its several names would swallow the prompts.
    flags.add_flags(engine, LaunchConfig, skip=("served_model_name",))
    sampling = parser.add_argument_group("sampling", "defaults come from the model's files")
    flags.add_flags(sampling, SamplingParams, skip=_NO_FLAG, help=_SAMPLING_HELP)
    sampling.add_argument(
        "--logit-bias", metavar="JSON", default=argparse.SUPPRESS, help='such as {"42": -5.0}'
    )
    sampling.add_argument(
        "--structured-outputs", metavar="JSON", default=argparse.SUPPRESS,
        help='the form of answers, such as {"regex": "[0-9]+"}',
    )  # fmt: skip


def _read_json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag} must be JSON, got {text!r}: {error}") from None


def _prompts_file(namespace: argparse.Namespace) -> str | None:
    """The one that was named; without any prompt, what is piped in."""
    name: str | None = namespace.prompts_file
    if name is None and not namespace.prompts and _is_piped(sys.stdin):
        return STDIN
    return name


def _is_piped(stream: TextIO) -> bool:
    """True for a pipe or a file, False for a terminal, /dev/null, or no stream at all."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _sampling(namespace: argparse.Namespace) -> dict[str, Any]:
    """Sampling flags that were given, checked once for all prompts."""
    fields = flags.given(namespace, SamplingParams)
    fields.pop("seed", None)
    try:
        for name in _AS_JSON & set(fields):
            fields[name] = _read_json(f"--{name.replace('_', '-')}", fields[name])
        asked = convert(fields, SamplingParams).structured_outputs
        if asked is not None:
            StructureCheck(has_tokens=True).check(FIELD, asked)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return fields
