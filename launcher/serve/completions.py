"""``/v1/completions``: prompts as text or token ids, continued."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lockstep.launcher.id_check import check_ids
from lockstep.launcher.inputs import PromptInput
from lockstep.launcher.outputs import RequestOutput
from lockstep.launcher.prepare import PreparedRequest
from lockstep.launcher.serve.answer import Answer
from lockstep.launcher.serve.api_errors import bad_request
from lockstep.launcher.serve.body import Record, refuse, sampling_of, take_fields
from lockstep.launcher.serve.call import UNSUPPORTED, Call, choices_of
from lockstep.launcher.serve.generation import Event
from lockstep.launcher.serve.logprob_shapes import (
    CompletionLogprobs,
    Described,
    completion_logprobs,
)
from lockstep.launcher.serve.shape import Shape
from lockstep.launcher.serve.state import name_of, read_call
from lockstep.launcher.tokenize import AnyTokenizer

Prompt = str | list[str | int | list[int]]
_UNSUPPORTED = UNSUPPORTED | {"suffix": ("",)}


class CompletionCall(Call, frozen=True, kw_only=True):
    """``prompt``: a text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: Prompt
    echo: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.prompt, list):
            kinds = {type(each) for each in self.prompt}
            if len(kinds) != 1:
                said = sorted(kind.__name__ for kind in kinds) or "nothing"
                raise ValueError(f"prompt must hold texts, ids, or lists of ids, got {said}")


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CompletionChoices:
    """Choices of completions.

    Args:
        echoes: of every choice the text that precedes its answer.
    """

    whole_name = chunk_name = "text_completion"

    def __init__(self, echoes: list[str]) -> None:
        self._echoes = echoes

    def openings(self) -> list[msgspec.Struct]:
        return [self._choice(i, echo) for i, echo in enumerate(self._echoes) if echo]

    def part(self, event: Event) -> msgspec.Struct:
        index, piece, reason = event
        return self._choice(index, piece.text, piece.logprobs or None, reason)

    def whole(self, output: RequestOutput) -> msgspec.Struct:
        text = self._echoes[output.index] + output.text
        return self._choice(output.index, text, output.logprobs, output.finish_reason)

    def _choice(
        self,
        index: int,
        text: str,
        described: Described | None = None,
        reason: str | None = None,
    ) -> CompletionChoice:
        logprobs = None if described is None else completion_logprobs(described)
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)


async def completions(request: Request) -> Response:
    """Raises ApiError: the call cannot be answered."""
    service, record = await read_call(request)
    refuse(record, _UNSUPPORTED)
    call = take_fields(record, CompletionCall)
    service.card_of(call.model)
    await service.offload(lambda: check_prompt(call.prompt, service.limits.vocab_size))
    sampling = sampling_of(record)
    if call.echo and "logprobs" in sampling:
        raise bad_request("echo cannot be combined with logprobs", "echo")
    given = [PromptInput(**form, sampling=sampling) for form in _forms(call.prompt)]
    requests = choices_of([await service.prepare(service.completion, p) for p in given], call.n)
    echoes = [_text(each, service.tokenizer) if call.echo else "" for each in requests]
    shape = Shape(service.card.id, call.n, CompletionChoices(echoes))
    name = name_of(request, call.request_id)
    return Answer(lambda: service.serve("cmpl", requests, name), shape, call.streaming)


def check_prompt(prompt: Prompt, vocab_size: int) -> None:
    """Raises ValueError for ids that the model has not, named as the client sent them."""
    if isinstance(prompt, str):
        return
    check_ids([each for each in prompt if isinstance(each, int)], vocab_size, "prompt")
    for number, each in enumerate(prompt):
        if isinstance(each, list):
            check_ids(each, vocab_size, f"prompt[{number}]")


def _text(request: PreparedRequest, tokenizer: AnyTokenizer) -> str:
    return tokenizer.decode(request.prompt_ids) if request.prompt is None else request.prompt


def _forms(prompt: Prompt) -> list[Record]:
    """One a prompt, as ``PromptInput`` takes them."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    return [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in prompt]
