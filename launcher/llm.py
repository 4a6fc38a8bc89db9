"""The offline class: an engine inside a Python program.

with LLM("smollm2", tensor_parallel_size=2) as llm:
    for output in llm.generate(["The sky is"], SamplingParams(temperature=0)):
        print(output.error or output.text)
"""

from collections.abc import Sequence
from itertools import count
from typing import Any, Self, TypeGuard

import msgspec

from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.chat_template import Message
from lockstep.launcher.config import build_config
from lockstep.launcher.engine import EngineSummary
from lockstep.launcher.errors import LaunchError
from lockstep.launcher.front_end import (
    FrontEnd,
    StartEngine,
    open_front_end,
    start_default_engine,
)
from lockstep.launcher.inputs import read_record
from lockstep.launcher.outputs import RequestOutput
from lockstep.launcher.prepare import prepare_all
from lockstep.launcher.session import run_all
from lockstep.worker.schedule.stats import SchedulerStats

Prompt = str | Sequence[int] | dict[str, Any]
Sampling = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model on its ranks, started here and ended by ``close`` or at the end of a ``with``.

    Whatever is called after that, but for ``close``, raises LaunchError.

    Args:
        model: directory, GGUF file, hub id, or "smollm2".
        start_engine: how ranks are started; Ray actors if it is None.
        settings: fields of ``LaunchConfig``.

    Raises:
        LaunchError: settings that cannot work, or ranks that cannot start.
    """

    def __init__(
        self, model: str, *, start_engine: StartEngine | None = None, **settings: Any
    ) -> None:
        config = build_config({"model": model, **settings})
        front = open_front_end(config, start_engine or start_default_engine, _silent)
        self._open: FrontEnd | None = front
        self._preparer = front.preparer(overrides={}, raw=True)
        self._calls = count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling = None
    ) -> list[RequestOutput]:
        """Continue plain texts or token ids; no chat template, but for ``messages``.

        Args:
            prompts: one prompt or several, each a text, token ids, or a dict with the fields of a
                line of a prompts file: ``prompt``, ``prompt_token_ids`` or ``messages``, and
                sampling parameters, which stand above ``sampling``.
            sampling: for all, or one each; None takes the model's defaults.

        Returns:
            One output a prompt, in their order. A prompt that cannot run harms no other: its output
            has ``error``, and "error" as ``finish_reason``; so has what ran when a rank was lost.

        Raises:
            ValueError: ``prompts`` or ``sampling`` is none of these, or has a parameter that cannot
                run; nothing is started then.
            EngineDead: a rank or the scheduler is lost, and there is more to run.
        """
        return self._run([_record(prompt) for prompt in _listed(prompts)], sampling)

    def chat(
        self, conversations: list[Message] | list[list[Message]], sampling: Sampling = None
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template.

        Returns and raises: as ``generate``.
        """
        several = _conversations(conversations)
        return self._run([{"messages": messages} for messages in several], sampling)

    def summary(self) -> EngineSummary:
        return self._front().engine.summary()

    def stats(self) -> SchedulerStats:
        return self._front().engine.stats()

    def close(self) -> None:
        """End every process of the engine. Safe to call twice."""
        front, self._open = self._open, None
        if front is not None:
            front.engine.shutdown()

    def __enter__(self) -> Self:
        self._front()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _front(self) -> FrontEnd:
        if self._open is None:
            raise LaunchError("this LLM is closed")
        return self._open

    def _run(self, records: list[dict[str, Any]], sampling: Sampling) -> list[RequestOutput]:
        session = self._front().session(prefix=f"call{next(self._calls)}-")
        fields_each = self._fields_each(sampling, len(records))
        lines = [fields | record for fields, record in zip(fields_each, records, strict=True)]
        return run_all(session, prepare_all(self._preparer, map(read_record, lines)))

    def _fields_each(self, sampling: Sampling, count: int) -> list[dict[str, Any]]:
        """The sampling parameters of each of ``count`` prompts, checked."""
        if not _is_list(sampling):
            return [self._checked(sampling)] * count
        if len(sampling) != count:
            raise ValueError(f"sampling: {count} are needed, got {len(sampling)}")
        return [self._checked(one) for one in sampling]

    def _checked(self, params: object) -> dict[str, Any]:
        fields = _fields(params)
        self._preparer.sampling(fields)
        return fields


def _fields(params: object) -> dict[str, Any]:
    if params is None:
        return {}
    if not isinstance(params, SamplingParams):
        needed = "SamplingParams, or a list with one for each prompt"
        raise ValueError(f"sampling must be {needed}, got {params!r}")
    return msgspec.structs.asdict(params)


def _record(prompt: Prompt) -> dict[str, Any]:
    """A prompt as a line of a prompts file has it."""
    if isinstance(prompt, dict):
        return prompt
    if _is_list(prompt):
        return {"prompt_token_ids": list(prompt)}
    return {"prompt": prompt}


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    if isinstance(prompts, str | dict):
        return [prompts]
    if not _is_list(prompts):
        needed = "text, token ids, a dict, or a list of these"
        raise ValueError(f"prompts must be {needed}, got {type(prompts).__name__}")
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)


def _conversations(given: list[Message] | list[list[Message]]) -> list[Any]:
    if not _is_list(given):
        needed = "a list of messages, or a list of such lists"
        raise ValueError(f"conversations must be {needed}, got {type(given).__name__}")
    return [given] if given and isinstance(given[0], dict) else list(given)


def _is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes)


def _silent(stage: str, done: int, total: int) -> None:
    pass
