"""The fused tail against the torch tail: same rows, same state, bit for bit."""

import math

import pytest
import torch
from kernel_device import kernel_device, kernel_marks
from sampling_cases import OneRank, join, lane_state, random_logits

DEVICE = kernel_device()

from lockstep.comm.collectives import Communicator  # noqa: E402
from lockstep.worker.sampler import Sampler  # noqa: E402
from lockstep.worker.sampling_state import Variant  # noqa: E402
from lockstep.worker.state import StepState  # noqa: E402
from lockstep.worker.step import Step  # noqa: E402

pytestmark = kernel_marks()
VOCAB, LANES = 60, 12


class Peers(OneRank):
    """A lockstep group of three of which this is the second."""

    rank, size = 1, 3


class Shards:
    """Three ranks: one with worse candidates, this one, and one that ties with it."""

    size = 3

    def all_gather(self, x):
        if x.shape[-1] == VOCAB:
            return torch.stack([x - 1, x, x - 2])
        scores, ids = x
        return torch.stack([torch.stack((scores - 1, ids + 2)), x, torch.stack((scores, ids + 7))])


def a_step(seed, *, lockstep=False, vocab_start=0, tp=None):
    """A step before its tail: lanes live, ended, mid-prompt, faulty, with bad logits, at a stop."""
    generator = torch.Generator().manual_seed(seed)

    def flags(chance):
        return torch.rand(LANES, generator=generator) < chance

    state = StepState(
        max_lanes=LANES, max_tokens=8, max_blocks_per_req=2, vocab_local=VOCAB, ring_depth=4,
        num_replicas=3 if lockstep else 1, device=DEVICE,
    )  # fmt: skip
    state.active.copy_(flags(0.8))
    state.samples.copy_(flags(0.8))
    state.query_lens.copy_(torch.randint(0, 4, (LANES,), generator=generator))
    state.faults.copy_(flags(0.2))
    state.last_token.copy_(torch.randint(1, VOCAB, (LANES,), generator=generator))
    state.output.counter.fill_(seed)
    state.peer_steps.fill_(7)
    state.peer_steps[-1] += seed % 2
    state.logits.copy_(random_logits(LANES, vocab=VOCAB, seed=seed))
    state.logits[1, 5], state.logits[2, 0], state.logits[3] = math.nan, math.inf, -math.inf
    lanes = lane_state(
        LANES, start=vocab_start, local=VOCAB, vocab=VOCAB + 2 * vocab_start, device=DEVICE
    )
    stops = state.logits.argmax(dim=-1)[:8].tolist()
    lanes.write_rows([
        join(lane, seed=lane, stop_ids=[3, stops[lane] + vocab_start], num_outputs=lane,
             temperature=0.0 if lane < 8 else 1.0, min_tokens=6 if lane % 2 else 0)
        for lane in range(8)
    ])  # fmt: skip
    dp = Peers() if lockstep else Communicator.single()
    return Step(None, None, state, Sampler(lanes, tp or OneRank()), dp)


def statics(step):
    return step.state.statics() | step.sampler.lanes.statics()


def check_tail(num_lanes, variant, seed, **options):
    expected, fused = (a_step(seed, **options) for _ in range(2))
    want = expected.plain_tail(num_lanes, variant)
    got = fused.fused_tail(num_lanes, variant)
    assert got.token_ids.equal(want.token_ids)
    assert got.finite.equal(want.finite)
    for name, tensor in statics(expected).items():
        assert torch.equal(statics(fused)[name].nan_to_num(), tensor.nan_to_num()), name


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("variant", [Variant.PLAIN, Variant.FILTERED])
@pytest.mark.parametrize("num_lanes", [1, 5, LANES])
def test_fused_tail_is_the_plain_tail(num_lanes, variant, lockstep):
    for seed in range(4):
        check_tail(num_lanes, variant, seed, lockstep=lockstep)


@pytest.mark.parametrize("variant", [Variant.PLAIN, Variant.FILTERED])
def test_fused_tail_over_shards(variant):
    for seed in range(4):
        check_tail(LANES, variant, seed, vocab_start=VOCAB, tp=Shards())


def test_logprobs_are_those_of_the_plain_tail():
    want = a_step(0).plain_tail(LANES, Variant.LOGPROBS).logprobs
    got = a_step(0).fused_tail(LANES, Variant.LOGPROBS).logprobs
    for one, other in zip(got, want, strict=True):
        assert one.nan_to_num().equal(other.nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("variant", [Variant.PLAIN, Variant.FILTERED, Variant.LOGPROBS])
def test_fused_tail_on_a_gpu(variant, lockstep):
    for seed in range(8):
        for num_lanes in (1, 7, LANES):
            check_tail(num_lanes, variant, seed, lockstep=lockstep)
        if not lockstep and variant is not Variant.LOGPROBS:
            check_tail(LANES, variant, seed, vocab_start=VOCAB, tp=Shards())
