"""Lanes, joins and logits for tests of the sampler."""

import torch

from lockstep.comm.messages import JoinLane, pack_ids
from lockstep.comm.sampling import SamplingParams
from lockstep.worker.sampler import Sampler
from lockstep.worker.sampling_state import LaneSampling

VOCAB = 101


class OneRank:
    """The communicator of a single rank, as far as the sampler asks."""

    size = 1

    def all_gather(self, x):
        return x[None]


def lane_state(num_lanes=6, *, start=0, local=None, vocab=VOCAB, device="cpu"):
    local = vocab - start if local is None else local
    return LaneSampling(
        num_lanes, vocab_start=start, vocab_local=local, vocab_size=vocab, device=device
    )


def join(lane, *, seed=0, stop_ids=(), num_prompt=3, num_outputs=0, params=None, **sampling):
    """A JoinLane with the sampling fields that matter to the sampler."""
    params = SamplingParams(**sampling) if params is None else params
    stop = pack_ids(stop_ids)
    return JoinLane(lane, f"r{lane}", seed, params, stop, num_prompt, 0, num_outputs, b"")


def sample_once(logits, joins, *, num_lanes=None, active=None, variant=None):
    """Sample every row of ``logits`` once with fresh lanes; returns the SampleOutput."""
    lanes = lane_state(num_lanes or len(logits), vocab=logits.shape[1])
    lanes.write_rows(joins)
    active = torch.ones(len(logits), dtype=torch.bool) if active is None else active
    return Sampler(lanes, OneRank()).sample(logits, active, variant or lanes.variant())


def random_logits(num_rows, *, vocab=VOCAB, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * scale
