"""The Triton draw against the torch one: same noise, same tokens, same verdict on bad rows."""

import math

import pytest
import torch
from kernel_device import kernel_device, kernel_marks
from sampling_cases import join, lane_state, random_logits

DEVICE = kernel_device()

from lockstep.worker.kernels import sample  # noqa: E402
from lockstep.worker.noise import gumbel  # noqa: E402

pytestmark = kernel_marks()
TEMPERATURES = [0.0, 1.0, 0.3, 5.0, 1e-4]


def lanes_of(num_rows, vocab):
    lanes = lane_state(num_rows, vocab=vocab, device=DEVICE)
    lanes.write_rows([
        join(row, seed=row * 0x1234567890AB - 5, num_outputs=row * 3,
             temperature=TEMPERATURES[row % len(TEMPERATURES)])
        for row in range(num_rows)
    ])  # fmt: skip
    return lanes


def scores_of(logits, lanes, start):
    rows, count = logits.shape
    noise = gumbel(lanes.seed[:rows], lanes.position[:rows], start, count)
    return logits + noise * lanes.temperature[:rows, None]


def check_draw(rows, vocab, start):
    logits = random_logits(rows, vocab=vocab, seed=rows + vocab).to(DEVICE)
    lanes = lanes_of(rows, vocab + start)
    scores, ids = sample.draw(logits, lanes, start)
    expected = scores_of(logits, lanes, start)
    best = expected.max(dim=-1)
    torch.testing.assert_close(scores, best.values, rtol=2e-5, atol=2e-5)
    # The logarithms may differ in the last bits, and so may ids whose scores are that close.
    of_ids = expected.gather(1, ids[:, None] - start)[:, 0]
    torch.testing.assert_close(of_ids, best.values, rtol=2e-5, atol=2e-5)
    greedy = lanes.temperature[:rows] == 0
    assert ids[greedy].equal(best.indices[greedy] + start)


@pytest.mark.parametrize(("rows", "vocab", "start"), [(1, 101, 0), (5, 1024, 51), (3, 1025, 2048)])
def test_draw_is_that_of_torch(rows, vocab, start):
    check_draw(rows, vocab, start)


def test_lowest_id_wins_over_blocks_and_inside_them():
    logits = torch.full((2, 3000), -5.0, device=DEVICE)
    logits[0, [1500, 1501, 2900]] = 1.0
    logits[1, [7, 8, 2048]] = 1.0
    lanes = lane_state(2, vocab=3000, device=DEVICE)
    assert sample.draw(logits, lanes, 0)[1].tolist() == [1500, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_rows_have_no_finite_score(temperature):
    logits = random_logits(5, vocab=2000).to(DEVICE)
    logits[1, 1999], logits[2, 0], logits[3] = math.nan, math.inf, -math.inf
    logits[4, 1:] = -math.inf
    lanes = lane_state(5, vocab=2000, device=DEVICE)
    lanes.write_rows([join(row, seed=row, temperature=temperature) for row in range(5)])
    scores, ids = sample.draw(logits, lanes, 0)
    assert scores.isfinite().tolist() == [True, False, False, False, True]
    assert ids[4] == 0


def test_draw_reads_rows_with_a_stride():
    wide = random_logits(3, vocab=200).to(DEVICE)
    lanes = lanes_of(3, 101)
    for got, want in zip(
        sample.draw(wide[:, 40:141], lanes, 0),
        sample.draw(wide[:, 40:141].contiguous(), lanes, 0),
        strict=True,
    ):
        assert got.equal(want)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [49152, 32000, 128256, 151936])
def test_draw_over_model_sizes(vocab):
    for rows in (1, 7, 256):
        check_draw(rows, vocab, 0)


@pytest.mark.gpu
def test_draw_ignores_the_batch():
    logits = random_logits(256, vocab=151936).to(DEVICE)
    lanes = lanes_of(256, 151936)
    together = sample.draw(logits, lanes, 0)
    for rows in (1, 3, 64):
        alone = sample.draw(logits[:rows], lanes, 0)
        assert alone[0].equal(together[0][:rows]) and alone[1].equal(together[1][:rows])
