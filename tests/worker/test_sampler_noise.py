"""The keyed noise: the published mixer, a standard Gumbel law, and no other key than its three."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_sampling import fmix32, noise_bits
from oracle_sampling import gumbel as oracle_gumbel

from lockstep.worker.noise import gumbel

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**31 - 1)


def of_lanes(*pairs, start=0, count=64):
    seed, position = torch.tensor(pairs, dtype=torch.int64).T
    return gumbel(seed, position, start, count)


def test_mixer_is_murmur3s():
    # The hash of the empty string is the finaliser of its seed; value from MurmurHash3's test set.
    assert fmix32(1) == 0x514E28B7


@settings(deadline=None)
@given(seed=SEEDS, position=POSITIONS, start=st.integers(0, 2**18))
def test_noise_is_that_of_plain_integers(seed, position, start):
    noise = of_lanes((seed, position), start=start, count=5)[0]
    expected = [oracle_gumbel(seed, position, start + i) for i in range(5)]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(seed=SEEDS, position=POSITIONS)
def test_noise_ignores_lane_batch_and_shard(seed, position):
    alone = of_lanes((seed, position))[0]
    others = of_lanes((1, 2), (seed ^ 1, position), (seed, position))
    assert torch.equal(others[2], alone)
    assert torch.equal(of_lanes((seed, position), start=40, count=24)[0], alone[40:])


@settings(deadline=None)
@given(seed=SEEDS, position=POSITIONS)
def test_another_seed_or_position_is_another_noise(seed, position):
    base, *others = of_lanes(
        (seed, position), (seed ^ 1, position), (seed ^ (1 << 32), position), (seed, position + 1)
    )
    assert all(not torch.equal(base, other) for other in others)


def test_noise_follows_the_gumbel_law():
    noise = of_lanes(*((seed, 0) for seed in range(64)), count=4096).double()
    # exp(-exp(-g)) is uniform: 64 equal cells, 63 degrees of freedom, 1e-4 quantile of chi-square.
    cells = torch.histc((-(-noise).exp()).exp(), bins=64, min=0, max=1)
    expected = noise.numel() / 64
    assert ((cells - expected) ** 2 / expected).sum() < 112
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.02)


@pytest.mark.parametrize("pair", [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((5, 5), (6, 4))])
def test_neighbouring_keys_are_uncorrelated(pair):
    first, second = of_lanes(*pair, count=1 << 16).double()
    correlation = torch.corrcoef(torch.stack((first, second)))[0, 1]
    assert abs(correlation) < 0.02  # five standard deviations at 65,536 samples


def test_the_extremes_of_the_hash_stay_finite():
    from lockstep.worker.noise import _gumbel_of_bits

    bits = torch.tensor([0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    noise = _gumbel_of_bits(bits.clone())
    assert noise.isfinite().all()
    assert noise[0] == pytest.approx(32 * math.log(2), rel=1e-5)
    assert noise[1] == noise[2] == noise.min()


def test_bits_of_consecutive_ids_are_balanced():
    ones = [0] * 32
    for token_id in range(2048):
        bits = noise_bits(7, 3, token_id)
        ones = [count + (bits >> place & 1) for place, count in enumerate(ones)]
    assert all(abs(count - 1024) < 5 * math.sqrt(2048) / 2 for count in ones)
