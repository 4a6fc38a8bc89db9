"""Rows, moves and histories of LaneSampling against a plain list of requests."""

import pytest
import torch
from sampling_cases import join, lane_state

from lockstep.worker.sampling_state import MAX_LANE_STOP_IDS, Variant


@pytest.mark.parametrize(
    ("sampling", "variant"),
    [
        ({"temperature": 0.0}, Variant.GREEDY),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3}, Variant.GREEDY),
        ({}, Variant.PLAIN),
        ({"top_k": 3}, Variant.FILTERED),
        ({"top_p": 0.9}, Variant.FILTERED),
        ({"min_p": 0.1}, Variant.FILTERED),
        ({"temperature": 0.0, "presence_penalty": 1.0}, Variant.FILTERED),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, Variant.FILTERED),
        ({"temperature": 0.0, "min_tokens": 2}, Variant.FILTERED),
        ({"temperature": 0.0, "logprobs": 0}, Variant.LOGPROBS),
    ],
)
def test_variant_is_the_least_that_serves_all_lanes(sampling, variant):
    lanes = lane_state()
    assert lanes.variant() is Variant.GREEDY
    lanes.write_rows([join(0, temperature=0.0), join(1, stop_ids=[7], **sampling)])
    assert lanes.variant() is variant
    lanes.reset_rows([1])
    assert lanes.variant() is Variant.GREEDY


def test_moved_row_is_the_written_row():
    lanes, expected = lane_state(), lane_state()
    rows = {"temperature": 0.5, "top_k": 4, "frequency_penalty": 0.5, "logit_bias": {5: 2.0}}
    lanes.write_rows([join(4, seed=-9, stop_ids=[1, 2], num_outputs=7, **rows)])
    lanes.record_chunk(4, torch.tensor([1, 1, 2, 3]), start=0)
    lanes.move_rows([(4, 1)])
    expected.write_rows([join(1, seed=-9, stop_ids=[1, 2], num_outputs=7, **rows)])
    expected.record_chunk(1, torch.tensor([1, 1, 2, 3]), start=0)
    torch.testing.assert_close(lanes._floats, expected._floats)
    torch.testing.assert_close(lanes._ints, expected._ints)
    torch.testing.assert_close(lanes.history[1], expected.history[1])
    assert lanes.mirror(1) == expected.mirror(1) and lanes.mirror(4) == expected.mirror(4)


def test_too_many_stop_ids_are_refused_by_name():
    ids = list(range(MAX_LANE_STOP_IDS + 1))
    with pytest.raises(ValueError, match=f"stop_ids of request r0 .* at most {MAX_LANE_STOP_IDS}"):
        lane_state().write_rows([join(0, stop_ids=ids)])
