"""The prompts of a run: random, or from a file. The same options give the same prompts."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lockstep.launcher.bench.options import BenchOptions
from lockstep.launcher.inputs import BadInput, PromptInput, read_lines
from lockstep.launcher.tokenize import load_tokenizer

CountTokens = Callable[[str], int]


def make_prompts(options: BenchOptions) -> list[PromptInput]:
    """``num_prompts`` of them, each with a ``max_tokens`` in its sampling parameters.

    Raises:
        ValueError: the file cannot be read or holds too few prompts; names it.
    """
    prompts = list(_random_prompts(options)) if options.prompts_file is None else _read(options)
    if len(prompts) < options.num_prompts:
        raise ValueError(
            f"num_prompts must be at most the {len(prompts)} of {options.prompts_file}, "
            f"got {options.num_prompts}"
        )
    return prompts[: options.num_prompts]


def _random_prompts(options: BenchOptions) -> Iterable[PromptInput]:
    source = random.Random(options.seed)
    for _ in range(options.num_prompts):
        input_len = _length(source, options.input_len, options.length_spread)
        output_len = _length(source, options.output_len, options.length_spread)
        ids = [source.randrange(options.vocab_size) for _ in range(input_len)]
        yield PromptInput(prompt_token_ids=ids, sampling={"max_tokens": output_len})


def _length(source: random.Random, mean: int, spread: float) -> int:
    reach = int(mean * spread)
    return source.randint(max(1, mean - reach), mean + reach)


def _read(options: BenchOptions) -> list[PromptInput]:
    path = Path(str(options.prompts_file))
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"prompts_file {path}: {error.strerror}") from None
    if text.lstrip().startswith(b"["):
        return list(_conversations(_json(path, text), options))
    found = [_checked(path, *each) for each in read_lines(text.splitlines(), "jsonl")]
    return [_with_max_tokens(prompt, options.output_len) for prompt in found]


def _json(path: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"prompts_file {path}: no valid JSON: {error}") from None


def _checked(path: Path, number: int, found: PromptInput | BadInput) -> PromptInput:
    if isinstance(found, BadInput):
        raise ValueError(f"prompts_file {path}: line {number}: {found.error}")
    return found


def _with_max_tokens(prompt: PromptInput, output_len: int) -> PromptInput:
    # A limit that the file sets itself comes last and wins.
    sampling = {"max_tokens": output_len, **prompt.sampling}
    return PromptInput(
        prompt=prompt.prompt,
        messages=prompt.messages,
        prompt_token_ids=prompt.prompt_token_ids,
        sampling=sampling,
    )


def _conversations(records: list[dict[str, Any]], options: BenchOptions) -> Iterable[PromptInput]:
    """First turns; their answers' lengths are the limits if a tokenizer can count them."""
    count = _counter(options.tokenizer)
    for record in records:
        turns = [str(turn["value"]) for turn in record.get("conversations", ())[:2]]
        if len(turns) < 2 or not turns[0]:
            continue
        limit = options.output_len if count is None else max(1, count(turns[1]))
        chat = options.endpoint == "chat"
        yield PromptInput(
            prompt=None if chat else turns[0],
            messages=[{"role": "user", "content": turns[0]}] if chat else None,
            sampling={"max_tokens": limit},
        )


def _counter(path: str | None) -> CountTokens | None:
    if path is None:
        return None
    tokenizer = load_tokenizer(path)
    return lambda text: len(tokenizer.encode(text))
