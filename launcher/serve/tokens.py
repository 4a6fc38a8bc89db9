"""``/tokenize`` and ``/detokenize``: what the model's tokenizer makes of a text."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lockstep.launcher.id_check import check_ids
from lockstep.launcher.serve.api_errors import bad_request
from lockstep.launcher.serve.body import json_response, take_fields
from lockstep.launcher.serve.chat import ChatCall, prompt_of
from lockstep.launcher.serve.state import read_call


class TokenizeCall(msgspec.Struct, frozen=True, kw_only=True):
    """``prompt`` is tokenized as ``/v1/completions`` does."""

    prompt: str
    model: str | None = None


class DetokenizeCall(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


async def tokenize(request: Request) -> Response:
    """Ids of a ``prompt``, or of ``messages`` put into the chat template.

    Raises:
        ApiError: 400 for a body with neither, or that cannot be tokenized.
    """
    service, record = await read_call(request)
    if "messages" in record:
        chat = take_fields(record, ChatCall)
        service.card_of(chat.model)
        prepared = await service.offload(lambda: service.chat.prepare(prompt_of(chat, record)))
        ids = prepared.prompt_ids
    else:
        call = take_fields(record, TokenizeCall)
        service.card_of(call.model)
        ids = await service.offload(lambda: service.tokenizer.encode(call.prompt))
    limit = service.card.max_model_len
    return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids})


async def detokenize(request: Request) -> Response:
    """Text of ``tokens``, special ones included, so that what was tokenized comes back.

    Raises:
        ApiError: 400 for ids that the model has not.
    """
    service, record = await read_call(request)
    call = take_fields(record, DetokenizeCall)
    service.card_of(call.model)
    try:
        check_ids(call.tokens, service.limits.vocab_size, "tokens")
    except ValueError as error:
        raise bad_request(str(error), "tokens") from None
    text = await service.offload(lambda: service.tokenizer.spell(call.tokens))
    return json_response({"prompt": text})
