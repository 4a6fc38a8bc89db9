"""``lockstep generate``: prompts in, answers out, a summary at the end."""

import os
import select
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lockstep.launcher.engine import EngineClient
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.files import check_readable, check_writable
from lockstep.launcher.front_end import FrontEnd
from lockstep.launcher.graph_stats import print_graph_stats, write_batch_histogram
from lockstep.launcher.inputs import BadInput, PromptInput, read_lines
from lockstep.launcher.line_errors import LineErrors
from lockstep.launcher.line_format import Format, by_first_line, by_name, filled
from lockstep.launcher.outputs import RequestOutput
from lockstep.launcher.prepare import prepare_all
from lockstep.launcher.printer import AnswerPrinter
from lockstep.launcher.resolve import Resolved, asked_mode
from lockstep.launcher.session import Progressed, in_order
from lockstep.launcher.start_report import num_graphs
from lockstep.launcher.tokenize import AnyTokenizer

STDIN = "-"
STDOUT = "-"


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to generate from and where answers go. ``sampling`` holds the flags that were given."""

    prompts: tuple[str, ...] = ()
    prompts_file: str | None = None
    prompts_format: Format = "auto"
    output: str | None = None
    raw: bool = False
    max_concurrency: int | None = None
    graph_stats: bool = False
    batch_histogram: str | None = None
    sampling: dict[str, Any] = {}


class Totals(msgspec.Struct):
    """Counts of a run, and the seconds that it took."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0

    def add(self, output: RequestOutput) -> None:
        self.requests += 1
        self.failed += output.error is not None
        self.prompt_tokens += output.num_prompt_tokens
        self.new_tokens += len(output.token_ids)


def check_options(options: GenerateOptions) -> None:
    """Refuse what would fail only after a long start.

    Raises:
        ConfigError: a limit below 1, no prompts, no such file or an empty one, no folder for the
            output.
    """
    if not options.prompts and options.prompts_file is None:
        raise ConfigError("no prompts: give some as arguments, in a --prompts-file, or piped in")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise ConfigError(f"max_concurrency must be at least 1, got {options.max_concurrency}")
    if options.prompts and options.prompts_file is not None:
        raise ConfigError("prompts given both as arguments and as --prompts-file")
    source = _source(options)
    if options.prompts_file is not None:
        _check_source(source)
    if options.output not in (None, STDOUT):
        _check_output(Path(str(options.output)), source)
    if options.batch_histogram is not None:
        _check_histogram(Path(options.batch_histogram), options.output, source)


def _source(options: GenerateOptions) -> Path | None:
    """The file of prompts, which may be a pipe; None for arguments and standard input."""
    name = options.prompts_file
    return None if name in (None, STDIN) else Path(str(name))


def _check_source(source: Path | None) -> None:
    if source is not None:
        check_readable("--prompts-file", source)
    if _is_empty(source):
        name = "standard input" if source is None else f"--prompts-file {source}"
        raise ConfigError(f"no prompts: {name} is empty")


def _is_empty(source: Path | None) -> bool:
    """True if nothing can come of it any more: an open pipe may still bring something."""
    if source is not None:
        return source.is_file() and source.stat().st_size == 0
    if sys.stdin is None:
        return True
    ready, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(ready) and not cast(BufferedReader, sys.stdin.buffer).peek(1)


def has_prompts(options: GenerateOptions) -> bool:
    """False if the file of prompts is known to bring none; a pipe may still."""
    source = _source(options)
    if source is None or not (source.is_file() or source.samefile(os.devnull)):
        return True
    return any(True for _ in filled(_open_lines(source)))


def answer_none(options: GenerateOptions) -> None:
    """Say so, and leave the files that a run leaves, with nothing in them."""
    _tell(f"nothing to do: --prompts-file {options.prompts_file} has only blank lines, or none")
    if options.output is not None:
        _write_records(Path(options.output), iter(()), Totals())
    if options.batch_histogram is not None:
        write_batch_histogram(Path(options.batch_histogram), {})


def check_text(options: GenerateOptions, tokenizer: AnyTokenizer) -> None:
    """Refuse prompts that are all text for a model that takes ids alone.

    Raises:
        ConfigError: says what to give instead.
    """
    if options.prompts or _known_format(options) == "text":
        try:
            tokenizer.encode("")
        except ValueError as error:
            raise ConfigError(str(error)) from None


def _check_histogram(path: Path, output: str | None, source: Path | None) -> None:
    check_writable("--batch-histogram", path)
    for flag, other in (("--output", output), ("--prompts-file", source)):
        if other is not None and path.absolute() == Path(other).absolute():
            raise ConfigError(f"--batch-histogram {path}: it is the file of {flag}")


def _check_output(path: Path, source: Path | None) -> None:
    check_writable("--output", path)
    if source is not None and path.exists() and path.samefile(source):
        raise ConfigError(f"--output {path}: prompts are read from it")


def generate(options: GenerateOptions, front: FrontEnd) -> Totals:
    """Run every prompt; write the answers to ``--output`` or to standard output.

    Raises:
        EngineDead: a rank or the scheduler is lost.
    """
    preparer = front.preparer(overrides=options.sampling, raw=options.raw)
    session = front.session(window=options.max_concurrency)
    totals = Totals()
    began = time.monotonic()
    lines = LineErrors()
    events = lines.located(session.run(prepare_all(preparer, open_inputs(options, lines))))
    if options.output is None:
        _print_answers(options, events, totals)
    else:
        _write_records(Path(options.output), events, totals)
    totals.seconds = time.monotonic() - began
    return totals


def open_inputs(options: GenerateOptions, lines: LineErrors) -> Iterable[PromptInput | BadInput]:
    """Records in input order; a file or a pipe is read as they are needed."""
    if options.prompts:
        return [PromptInput(prompt=prompt) for prompt in options.prompts]
    source = _source(options)
    format = by_name(options.prompts_format, source)
    return lines.unnumbered(read_lines(_open_lines(source), format, _tell))


def _tell(text: str) -> None:
    sys.stderr.write(f"lockstep: {text}\n")


def _open_lines(source: Path | None) -> Iterator[bytes]:
    if source is None:
        yield from sys.stdin.buffer
        return
    with open(source, "rb") as file:
        yield from file


def _known_format(options: GenerateOptions) -> Format:
    """That of the prompts; ``auto`` for a pipe, whose first line is not there to be read twice."""
    source = _source(options)
    format = by_name(options.prompts_format, source)
    if format == "auto" and source is not None and source.is_file():
        return by_first_line(_open_lines(source))
    return format


def _print_answers(options: GenerateOptions, events: Iterator[Progressed], totals: Totals) -> None:
    printer = AnswerPrinter(sys.stdout, sys.stderr, headings=len(options.prompts) != 1)
    for event in events:
        printer.show(event)
        if event.output is not None:
            totals.add(event.output)


def _write_records(path: Path, events: Iterator[Progressed], totals: Totals) -> None:
    encoder = msgspec.json.Encoder()
    with _open_output(path) as file:
        for output in in_order(_watched(events, totals)):
            file.write(encoder.encode(output.to_record()) + b"\n")
            file.flush()


def _open_output(path: Path) -> AbstractContextManager[BinaryIO]:
    if str(path) == STDOUT:
        return nullcontext(sys.stdout.buffer)
    try:
        return open(path, "wb")
    except OSError as error:
        raise ConfigError(f"--output {path}: it cannot be written: {error.strerror}") from None


def _watched(events: Iterator[Progressed], totals: Totals) -> Iterator[RequestOutput]:
    """Outputs as they come, counted, with a bar if a person is looking."""
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=None, tokens=0)
        tokens = 0
        for event in events:
            tokens += event.num_tokens
            bar.update(task, advance=event.output is not None, tokens=tokens)
            if event.output is not None:
                totals.add(event.output)
                yield event.output


def summarize(resolved: Resolved, engine: EngineClient, totals: Totals) -> str:
    """Two lines: what ran, and what it did."""
    parallel = resolved.worker.parallel
    how, stats = engine.summary(), engine.stats()
    preemptions = sum(replica.num_preemptions for replica in stats.replicas)
    preempted = f", {preemptions} preemptions" if preemptions else ""
    seconds = max(totals.seconds, 1e-9)
    failed = f" ({totals.failed} failed)" if totals.failed else ""
    wish = asked_mode(resolved.launch)
    asked = "" if wish == how.graph_mode else f" ({wish} was asked for)"
    return (
        f"{how.ranks} ranks (tp {parallel.tp_size} x dp {parallel.dp_size}) on "
        f"{resolved.device} through {how.launcher}, graph mode {how.graph_mode}{asked}, "
        f"{num_graphs(how, stats)} graphs captured on each\n"
        f"{totals.requests} requests{failed}, {totals.prompt_tokens} prompt tokens, "
        f"{totals.new_tokens} new tokens in {seconds:.1f} s: "
        f"{totals.new_tokens / seconds:.1f} tokens/s{preempted}\n"
    )


def report_graphs(options: GenerateOptions, engine: EngineClient) -> None:
    """What was asked to be told of the steps: a table on standard error, a file."""
    if options.graph_stats:
        print_graph_stats(engine.stats())
    if options.batch_histogram is not None:
        write_batch_histogram(Path(options.batch_histogram), engine.stats().batch_sizes)
