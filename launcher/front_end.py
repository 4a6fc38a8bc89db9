"""A started engine with the tokenizer before it: what every way in (command, class) is built on."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.launcher.config import LaunchConfig
from lockstep.launcher.engine import EngineClient, Progress
from lockstep.launcher.errors import ConfigError
from lockstep.launcher.prepare import Preparer
from lockstep.launcher.resolve import Resolved, resolve
from lockstep.launcher.session import Session
from lockstep.launcher.tokenize import (
    TOKENIZER,
    AnyTokenizer,
    NoTokenizer,
    load_tokenizer,
    read_files,
)
from lockstep.worker.config import WorkerConfig
from lockstep.worker.weights.generation import GenerationDefaults

StartEngine = Callable[[Resolved, Progress], EngineClient]

DEFAULT_MAX_TOKENS = 256
# Enough in flight that a replica that ends several requests in one step finds others waiting.
_QUEUED_PER_LANE = 2


def open_tokenizer(resolved: Resolved) -> AnyTokenizer:
    """The tokenizer of the model, or of ``--tokenizer``; dummy weights can do without one.

    Raises:
        ConfigError: a file is missing or damaged; names it.
    """
    launch = resolved.launch
    path = resolved.worker.tokenizer_path
    try:
        if launch.load_format == "dummy" and TOKENIZER not in read_files(path):
            return NoTokenizer()
        return load_tokenizer(path, chat_template=launch.chat_template)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def sampling_defaults(generation: GenerationDefaults) -> dict[str, Any]:
    """Sampling parameters that the model's files set, and our bound on the output."""
    named = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: getattr(generation, name) for name in named}
    said = {name: value for name, value in values.items() if value is not None}
    return said | {"max_tokens": DEFAULT_MAX_TOKENS}


def default_window(worker: WorkerConfig) -> int:
    """Requests in flight that keep all lanes busy and that the scheduler's queue can take."""
    lanes = worker.schedule.max_num_seqs * worker.parallel.dp_size
    queued = worker.schedule.max_queued_requests
    return max(1, lanes * _QUEUED_PER_LANE if queued is None else min(lanes, queued))


@dataclass(frozen=True)
class FrontEnd:
    """A model that can serve. Who opened it must call ``engine.shutdown``."""

    resolved: Resolved
    tokenizer: AnyTokenizer
    engine: EngineClient

    def preparer(self, *, overrides: dict[str, Any], raw: bool) -> Preparer:
        """Prompts get the model's sampling defaults, replaced by ``overrides``, then their own."""
        resolved, vocab_size = self.resolved, self.resolved.worker.model.vocab_size
        return Preparer(
            self.tokenizer,
            vocab_size=vocab_size,
            # Files may name end tokens that this model cannot sample.
            end_ids=[i for i in resolved.generation.eos_token_ids if i < vocab_size],
            defaults=sampling_defaults(resolved.generation) | overrides,
            max_model_len=resolved.worker.schedule.max_model_len,
            raw=raw,
        )

    def session(self, *, window: int | None = None, prefix: str = "r") -> Session:
        """A session that keeps every lane of every replica busy, or at most ``window`` of them."""
        window = window or default_window(self.resolved.worker)
        return Session(self.engine, self.tokenizer, window=window, prefix=prefix)


def open_front_end(
    config: LaunchConfig,
    start_engine: StartEngine,
    progress: Progress,
    check: Callable[[AnyTokenizer], None] = lambda tokenizer: None,
) -> FrontEnd:
    """Resolve the settings, tell what was chosen, and start.

    Args:
        check: raises ConfigError if the tokenizer is not what the caller needs.

    Raises:
        LaunchError: settings that cannot work, or an engine that cannot start.
    """
    resolved = resolve(config, progress=progress)
    for note in resolved.notes:
        sys.stderr.write(f"lockstep: {note}\n")
    # A bad file of the tokenizer is refused before ranks load, not after.
    tokenizer = open_tokenizer(resolved)
    check(tokenizer)
    return FrontEnd(resolved, tokenizer, start_engine(resolved, progress))


def start_default_engine(resolved: Resolved, progress: Progress) -> EngineClient:
    """Ranks as Ray actors. Ray is loaded only now: other launchers must not need it."""
    from lockstep.launcher.cluster import start_ray_engine

    return start_ray_engine(resolved, progress)
