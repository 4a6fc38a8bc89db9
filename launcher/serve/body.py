"""The body of a call: read up to a limit, decoded, split into what each part of us checks."""

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lockstep.comm.sampling import SamplingParams
from lockstep.launcher.serve.api_errors import ApiError, bad_request, refused_value
from lockstep.launcher.strict import convert
from lockstep.launcher.structured import FIELD, RESPONSE_FORMAT

Record = dict[str, Any]
C = TypeVar("C", bound=msgspec.Struct)

# Of older servers, which had a field for each kind of form.
_GUIDED = "guided_"
SAMPLING = (*SamplingParams.__struct_fields__, RESPONSE_FORMAT)
_encode = msgspec.json.Encoder().encode


async def read_record(request: Request, max_bytes: int) -> Record:
    """The JSON object that a client sent; fields that are null are left out, as if not sent.

    Raises:
        ApiError: 413 for a body above ``max_bytes``, 400 for anything but a JSON object.
        ClientDisconnect: the client has gone.
    """
    record = _decode(await _read(request, max_bytes))
    if not isinstance(record, dict):
        raise bad_request(f"a JSON object is needed, got {type(record).__name__}")
    return {key: value for key, value in record.items() if value is not None}


async def _read(request: Request, max_bytes: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            message = f"the body must be at most {max_bytes} bytes (--max-request-bytes)"
            raise ApiError(413, "invalid_request_error", message)
        parts.append(part)
    return b"".join(parts)


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _decode_leniently(body)


def _decode_leniently(body: bytes) -> Any:
    """Python's reader takes NaN, which JSON has not, so that checks can name its field."""
    try:
        return json.loads(body)
    except RecursionError:
        raise bad_request("JSON is nested too deeply") from None
    except ValueError as error:
        raise bad_request(f"no valid JSON: {error}") from None


def take_fields(record: Record, struct: type[C]) -> C:
    """The part of a record that ``struct`` knows.

    Raises:
        ApiError: 400 that names the field and its value.
    """
    known = struct.__struct_fields__
    try:
        return convert({key: value for key, value in record.items() if key in known}, struct)
    except ValueError as error:
        raise refused_value(str(error), known) from None


def sampling_of(record: Record) -> Record:
    """The sampling parameters of a record, unchecked."""
    return {key: record[key] for key in SAMPLING if key in record}


def refuse(record: Record, unsupported: Mapping[str, Collection[Any]]) -> None:
    """Refuse fields that would change the answer and that nobody here would follow.

    Args:
        unsupported: fields, each with the values that ask for nothing.

    Raises:
        ApiError: 400 that names the field.
    """
    for field, value in record.items():
        if field.startswith(_GUIDED):
            raise bad_request(f"{field} is not supported; there is {FIELD}", field)
        if field in unsupported and value not in unsupported[field]:
            raise bad_request(f"{field} is not supported", field)


def json_response(body: msgspec.Struct | Record, status: int = 200) -> Response:
    return Response(_encode(body), status, media_type="application/json")
