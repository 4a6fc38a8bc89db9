"""``/v1/chat/completions``: a conversation, answered through the model's own template."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from lockstep.comm.sampling import MAX_LOGPROBS
from lockstep.launcher.inputs import PromptInput
from lockstep.launcher.outputs import RequestOutput
from lockstep.launcher.serve.answer import Answer
from lockstep.launcher.serve.body import Record, refuse, sampling_of, take_fields
from lockstep.launcher.serve.call import UNSUPPORTED, Call, choices_of
from lockstep.launcher.serve.generation import Event
from lockstep.launcher.serve.logprob_shapes import ChatLogprobs, Described, chat_logprobs
from lockstep.launcher.serve.shape import Shape
from lockstep.launcher.serve.state import name_of, read_call

_UNSUPPORTED = UNSUPPORTED | {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "continue_final_message": (False,),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
    "audio": (),
    "modalities": (["text"],),
}


class ChatCall(Call, frozen=True, kw_only=True):
    """``logprobs`` asks for log-probabilities, ``top_logprobs`` for that many alternatives."""

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs=true")
        if "messages" in self.chat_template_kwargs:
            raise ValueError("chat_template_kwargs cannot replace messages")


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to a message; ``role`` in the first of a choice only."""

    role: str | UnsetType = UNSET
    content: str = ""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Of a whole answer ``message``, of a chunk ``delta``."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChoices:
    """Choices of chats, ``n`` of them."""

    whole_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, n: int, token_bytes: Callable[[int], bytes]) -> None:
        self._n = n
        self._token_bytes = token_bytes

    def openings(self) -> list[msgspec.Struct]:
        begin = ChatDelta(role="assistant")
        return [ChatChoice(index=index, delta=begin) for index in range(self._n)]

    def part(self, event: Event) -> msgspec.Struct:
        index, piece, reason = event
        return ChatChoice(
            index=index,
            delta=ChatDelta(content=piece.text),
            logprobs=self._logprobs(piece.logprobs or None),
            finish_reason=reason,
        )

    def whole(self, output: RequestOutput) -> msgspec.Struct:
        return ChatChoice(
            index=output.index,
            message=ChatMessage(content=output.text),
            logprobs=self._logprobs(output.logprobs),
            finish_reason=output.finish_reason,
        )

    def _logprobs(self, described: Described | None) -> ChatLogprobs | None:
        return None if described is None else chat_logprobs(described, self._token_bytes)


async def chat_completions(request: Request) -> Response:
    """Raises ApiError: the call cannot be answered."""
    service, record = await read_call(request)
    refuse(record, _UNSUPPORTED)
    call = take_fields(record, ChatCall)
    service.card_of(call.model)
    given = await service.offload(lambda: prompt_of(call, record))
    requests = choices_of([await service.prepare(service.chat, given)], call.n)
    choices = ChatChoices(call.n, service.tokenizer.token_bytes)
    shape = Shape(service.card.id, call.n, choices)
    name = name_of(request, call.request_id)
    return Answer(lambda: service.serve("chatcmpl", requests, name), shape, call.streaming)


def prompt_of(call: ChatCall, record: Record) -> PromptInput:
    """Raises ValueError: messages that are none."""
    sampling = sampling_of(record)
    sampling.pop("logprobs", None)
    if call.logprobs:
        sampling["logprobs"] = call.top_logprobs or 0
    if call.max_completion_tokens is not None:
        sampling["max_tokens"] = call.max_completion_tokens
    template = {"add_generation_prompt": call.add_generation_prompt} | call.chat_template_kwargs
    return PromptInput(messages=call.messages, template_variables=template, sampling=sampling)
