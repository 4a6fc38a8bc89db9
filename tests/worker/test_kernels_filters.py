"""The filter kernels against the torch filters, which are tested against the formulae."""

import math

import pytest
import torch
from kernel_device import kernel_device, kernel_marks
from sampling_cases import join, lane_state, random_logits

DEVICE = kernel_device()

from lockstep.worker.filters import adjust_torch, cut  # noqa: E402
from lockstep.worker.kernels.adjust import adjust  # noqa: E402
from lockstep.worker.kernels.cut import LIST_CAPACITY, draw_filtered  # noqa: E402
from lockstep.worker.kernels.sample import draw  # noqa: E402

pytestmark = kernel_marks()

KINDS = [
    {},
    {"temperature": 0.0, "top_k": 3},
    {"top_k": 1},
    {"top_k": 2, "temperature": 4.0},
    {"top_k": 40, "top_p": 0.9, "temperature": 0.6},
    {"top_k": 700},
    {"top_p": 0.3},
    {"top_p": 0.95, "temperature": 1.3},
    {"top_p": 0.999, "temperature": 3.0, "min_p": 0.02},
    {"top_p": 1e-6},
    {"min_p": 0.1, "temperature": 2.0},
    {"min_p": 1.0, "top_k": 50},
    {"min_p": 0.3, "top_k": 5, "top_p": 0.8},
    {"top_p": 0.9, "temperature": 1e-5},
]


def filled(num_rows, vocab, *, start=0, local=None, kinds=KINDS):
    lanes = lane_state(num_rows, start=start, local=local, vocab=vocab, device=DEVICE)
    lanes.write_rows([
        join(row, seed=17 * row, num_outputs=row, num_prompt=2, **kinds[row % len(kinds)])
        for row in range(num_rows)
    ])  # fmt: skip
    return lanes


def check_draws(logits, lanes, *, capacity=LIST_CAPACITY, allowed=0):
    logits = logits.to(DEVICE)
    scores, ids = draw_filtered(logits, lanes, capacity=capacity)
    want_scores, want_ids = draw(cut(logits.clone(), lanes), lanes, 0)
    assert scores.isfinite()[:, 0].equal(want_scores.isfinite())
    usable = want_scores.isfinite()
    assert (ids[usable, 0] != want_ids[usable]).sum() <= allowed


@pytest.mark.parametrize(("vocab", "rows"), [(101, 28), (1024, 14), (3000, 14)])
def test_draws_are_those_of_the_sorted_cut(vocab, rows):
    check_draws(random_logits(rows, vocab=vocab), filled(rows, vocab))


def test_a_list_that_is_too_short_only_costs_time():
    rows = len(KINDS)
    check_draws(random_logits(rows, vocab=2500), filled(rows, 2500), capacity=8)


@pytest.mark.parametrize("capacity", [64, 41, 40, 21])
def test_every_kept_token_can_be_drawn(capacity):
    """Nearly flat rows, where a token too many or too few shows in the draws; 41 tokens reach
    the floor of min_p, so the list is long enough, just long enough, too short."""
    rows = 48
    logits = (-0.01 * torch.arange(101.0)).expand(rows, -1).contiguous()
    kinds = [{"min_p": math.exp(-0.405)}, {"min_p": math.exp(-0.405), "top_p": 0.7}, {"top_p": 0.4}]
    check_draws(logits, filled(rows, 101, kinds=kinds), capacity=capacity)


def test_ties_are_kept_together():
    logits = random_logits(len(KINDS), vocab=2000).round()
    check_draws(logits, filled(len(KINDS), 2000))
    check_draws(torch.zeros(len(KINDS), 2000), filled(len(KINDS), 2000))


def test_strange_rows():
    logits = random_logits(len(KINDS), vocab=1500)
    logits[4, 7], logits[5, 1400], logits[6] = math.nan, math.inf, -math.inf
    logits[7, 1:], logits[8, 4:] = -math.inf, -math.inf
    logits[12, ::2] = -0.0
    check_draws(logits, filled(len(KINDS), 1500))


PENALTIES = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": -0.2},
    {"logit_bias": {0: 2.0, 60: -3.0, 100: 1.0}, "min_tokens": 3},
    {"repetition_penalty": 0.8, "presence_penalty": 1.0, "logit_bias": {2: 4.0, 61: -4.0}},
    {"min_tokens": 50, "max_tokens": None},
]


def check_adjusted(start, local):
    rows = 2 * len(PENALTIES)
    lanes = lane_state(rows, start=start, local=local, vocab=101, device=DEVICE)
    lanes.write_rows([
        join(row, stop_ids=[0, 50, 60, 99], num_outputs=row // 6, num_prompt=3,
             **PENALTIES[row % 6])
        for row in range(rows)
    ])  # fmt: skip
    for row in range(rows):
        lanes.record_chunk(row, torch.tensor([0, 60, 61, 2, 2, 100], device=DEVICE), start=0)
    logits = random_logits(rows, vocab=local).to(DEVICE)
    logits[5, 0], logits[11, 48] = math.nan, math.inf
    logits[0, :2] = torch.tensor([-0.0, -math.inf])
    before = logits.clone()
    adjusted = adjust(logits, lanes)
    torch.testing.assert_close(adjusted, adjust_torch(logits, lanes), equal_nan=True)
    assert adjusted[0].view(torch.int32).equal(logits[0].view(torch.int32))
    assert logits.view(torch.int32).equal(before.view(torch.int32))


@pytest.mark.parametrize(("start", "local"), [(0, 101), (50, 51)])
def test_adjusted_logits_are_those_of_torch(start, local):
    check_adjusted(start, local)


@pytest.mark.gpu
def test_adjusted_logits_on_a_gpu():
    for start, local in ((0, 101), (50, 51)):
        check_adjusted(start, local)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [49152, 128256, 151936])
@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_draws_over_model_sizes(vocab, scale):
    for rows in (1, 14, 256):
        logits = random_logits(rows, vocab=vocab, scale=scale)
        # Exponentials may differ in the last bit, and so may a token on the edge of a nucleus.
        check_draws(logits, filled(rows, vocab), allowed=rows // 64)


@pytest.mark.gpu
def test_draws_ignore_the_batch():
    logits = random_logits(128, vocab=151_936).to(DEVICE)
    lanes = filled(128, 151_936)
    together = draw_filtered(logits, lanes)[1]
    for rows in (1, 3, 14, 64):
        for _ in range(3):
            assert draw_filtered(logits[:rows].contiguous(), lanes)[1].equal(together[:rows])
