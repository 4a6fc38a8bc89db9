"""The offline class: an engine inside a Python program.

with LLM("smollm2", tensor_parallel_size=2) as llm:
    for output in llm.generate(["The sky is"], SamplingParams(temperature=0)):
        ...
"""

from collections.abc import Sequence
from itertools import count
from typing import Any, Self

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
from lockstep.launcher.inputs import PromptInput
from lockstep.launcher.outputs import RequestOutput
from lockstep.launcher.prepare import PreparedRequest
from lockstep.launcher.session import run_all
from lockstep.worker.schedule.stats import SchedulerStats

Prompt = str | Sequence[int]
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
        """Continue plain texts or token ids; no chat template.

        Args:
            prompts: one prompt or several.
            sampling: for all, or one each; None takes the model's defaults.

        Raises:
            ValueError: a prompt or a parameter that cannot run; nothing is started then.
            EngineDead: a rank or the scheduler is lost.
        """
        return self._run([_given(prompt) for prompt in _listed(prompts)], sampling)

    def chat(
        self, conversations: list[Message] | list[list[Message]], sampling: Sampling = None
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template.

        Raises: as ``generate``.
        """
        several = _conversations(conversations)
        return self._run([PromptInput(messages=messages) for messages in several], sampling)

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

    def _run(self, inputs: list[PromptInput], sampling: Sampling) -> list[RequestOutput]:
        session = self._front().session(prefix=f"call{next(self._calls)}-")
        return run_all(session, self._prepare(inputs, sampling))

    def _prepare(self, inputs: list[PromptInput], sampling: Sampling) -> list[PreparedRequest]:
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling_each: Sequence[SamplingParams | None] = [sampling] * len(inputs)
        else:
            sampling_each = sampling
        if len(sampling_each) != len(inputs):
            raise ValueError(f"sampling: {len(inputs)} are needed, got {len(sampling_each)}")
        return [
            self._preparer.prepare(_with_sampling(given, params))
            for given, params in zip(inputs, sampling_each, strict=True)
        ]


def _with_sampling(given: PromptInput, params: SamplingParams | None) -> PromptInput:
    if params is None:
        return given
    return msgspec.structs.replace(given, sampling=msgspec.structs.asdict(params))


def _given(prompt: Prompt) -> PromptInput:
    if isinstance(prompt, str):
        return PromptInput(prompt=prompt)
    return PromptInput(prompt_token_ids=list(prompt))


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _conversations(given: list[Message] | list[list[Message]]) -> list[list[Message]]:
    several = [one for one in given if isinstance(one, list)]
    return several or [[one for one in given if isinstance(one, dict)]]


def _silent(stage: str, done: int, total: int) -> None:
    pass
