import pytest

from lockstep.comm import codec
from lockstep.comm.errors import WireError
from lockstep.comm.messages import (
    Chunk,
    ReplicaPlan,
    StepAgreement,
    StepPlan,
    StepResult,
    StopWorkers,
    WorkerFailed,
    pack_ids,
)

_PLAN = StepPlan(
    epoch=3,
    step_id=41,
    agreement=StepAgreement(0, None, [5, 0], 0),
    replicas=[ReplicaPlan(1, chunks=[Chunk(0, pack_ids([7, 2**31 - 1]), True)]), ReplicaPlan(0)],
)
_CASES = [
    (codec.decode_plan, _PLAN),
    (codec.decode_plan, StopWorkers(epoch=3, reason="done")),
    (codec.decode_result, StepResult(3, 41, 1, 0, pack_ids([1]), pack_ids([9]))),
    (codec.decode_result, WorkerFailed(1, 41, "ValueError", "Traceback")),
]


@pytest.mark.parametrize("decode, message", _CASES)
def test_every_message_comes_back_equal(decode, message) -> None:
    assert decode(codec.encode(message)) == message


def test_other_wire_version_is_named() -> None:
    data = bytes([codec.WIRE_VERSION + 1]) + codec.encode(_PLAN)[1:]
    with pytest.raises(WireError, match="wire version is .*, this process speaks"):
        codec.decode_plan(data)
    with pytest.raises(WireError, match="nothing"):
        codec.decode_plan(b"")


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_damaged_bytes_are_an_error_and_never_a_message(cut: int) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        codec.decode_plan(codec.encode(_PLAN)[:-cut])


def test_message_of_another_channel_is_an_error() -> None:
    with pytest.raises(WireError, match="cannot be read"):
        codec.decode_result(codec.encode(_PLAN))
