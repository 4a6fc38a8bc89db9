"""What the scheduler refuses, before any state is made, and that it harms nobody."""

import pytest
from sim_worker import VOCAB, Rig, make_add

from lockstep.worker.schedule.checks import QueueFull


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ([], {}, r"prompt must hold 1 to 63 tokens \(max_model_len 64.*got 0"),
        ([1] * 64, {}, "prompt must hold 1 to 63 tokens.*got 64"),
        ([1] * 640, {}, "prompt must hold 1 to 63 tokens.*got 640"),
        ([1, VOCAB], {}, r"prompt must be in \[0, 97\), got 97"),
        ([-1], {}, r"prompt must be in \[0, 97\), got -1"),
        ([1], {"stops": (2, 2**31 - 1)}, r"stop_ids must be in \[0, 97\), got 2147483647"),
        ([1], {"stop_token_ids": (97,)}, r"stop_token_ids must be in \[0, 97\), got 97"),
        (
            [1],
            {"logit_bias": {97: 1.0}},
            r"^logit_bias: its token ids must be in \[0, 97\), got 97",
        ),
        ([1] * 30, {"max_tokens": 20}, r"9 KV blocks of 4 tokens, got 30 \+ 20 tokens = 13 blocks"),
    ],
)
def test_bad_request_is_refused_and_harms_nobody(prompt, more: dict, message: str) -> None:
    rig = Rig(num_blocks=10)
    with pytest.raises(ValueError, match=message):
        rig.scheduler.add(make_add("bad", prompt, **more))
    assert not rig.scheduler.has_work()
    for index in range(20):
        rig.add(f"r{index}", [index], 4)
    rig.run()
    rig.check_outputs()


def test_longest_prompt_is_served_and_ends_at_max_model_len() -> None:
    rig = Rig()
    rig.add("a", [1] * 63, None)
    rig.add("b", [2] * 60, None)
    rig.run()
    assert {req_id: len(out) for req_id, out in rig.outputs().items()} == {"a": 1, "b": 4}
    assert set(rig.reasons().values()) == {"length"}


def test_without_max_tokens_a_small_pool_bounds_the_output() -> None:
    rig = Rig(num_blocks=6)
    rig.add("a", [1] * 7, None)
    rig.run()
    assert len(rig.outputs()["a"]) == 5 * 4 - 7 + 1


def test_a_live_id_is_refused_and_can_be_used_again() -> None:
    rig = Rig()
    rig.add("a", [1], 4)
    with pytest.raises(ValueError, match="req_id must not be in use, got 'a' twice"):
        rig.scheduler.add(make_add("a", [2]))
    with pytest.raises(ValueError, match="req_id must not be empty"):
        rig.scheduler.add(make_add("", [2]))
    rig.run()
    rig.check_outputs()
    rig.deltas.clear()
    rig.add("a", [3], 5)
    rig.run()
    rig.check_outputs()


def test_queue_is_bounded_when_asked() -> None:
    rig, refused = Rig(max_queued_requests=4), 0
    for index in range(50):
        try:
            rig.add(f"r{index}", [index], 3)
        except QueueFull as error:
            assert "max_queued_requests must be at most 4" in str(error)
            refused += 1
    assert refused == 46
    rig.run()
    rig.check_outputs()
