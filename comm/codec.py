"""Messages to bytes and back: one version byte, then msgpack. One decoder per channel."""

from typing import TypeVar

import msgspec

from lockstep.comm.errors import WireError
from lockstep.comm.messages import WIRE_VERSION, PlanMessage, ResultMessage

_T = TypeVar("_T")
_PREFIX = bytes([WIRE_VERSION])

_encoder = msgspec.msgpack.Encoder()
_plans: msgspec.msgpack.Decoder[PlanMessage] = msgspec.msgpack.Decoder(PlanMessage)
_results: msgspec.msgpack.Decoder[ResultMessage] = msgspec.msgpack.Decoder(ResultMessage)


def encode(message: msgspec.Struct) -> bytes:
    """Bytes of any message of ``comm.messages``."""
    return _PREFIX + _encoder.encode(message)


def decode_plan(data: bytes) -> PlanMessage:
    """Read the scheduler -> worker channel. Raises WireError if the bytes are not a message."""
    return _decode(_plans, data)


def decode_result(data: bytes) -> ResultMessage:
    """Read the worker -> scheduler channel. Raises WireError if the bytes are not a message."""
    return _decode(_results, data)


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", data: bytes) -> _T:
    if data[:1] != _PREFIX:
        found = data[0] if data else "nothing"
        raise WireError(f"wire version is {found}, this process speaks {WIRE_VERSION}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"a message of {len(data)} bytes cannot be read: {error}") from error
