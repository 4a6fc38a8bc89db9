"""Random weights: one model whatever the number of ranks, never zero, fixed by the seed."""

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_request import OneRank, loaded, worker_config

from lockstep.worker.config import ModelConfig
from lockstep.worker.weights.dummy import DummySource

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=101,
    hidden_size=24,
    intermediate_size=36,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=8,
    max_position_embeddings=64,
    qk_norm=True,
    qkv_bias=True,
    initializer_range=0.05,
)


def load(tp=None, seed=0):
    config = worker_config(CONFIG, load_format="dummy")
    return loaded(msgspec.structs.replace(config, seed=seed), tp)


def test_every_rank_holds_its_part_of_one_model():
    whole = {w.name: w.target for w in load().weight_shards()}
    for size in (2, 3, 4):
        for rank in range(size):
            for weight in load(OneRank(rank, size)).weight_shards():
                shard, dim = weight.shard, weight.shard.dim
                expected = whole[weight.name].narrow(dim, shard.start, shard.length)
                assert torch.equal(weight.target.narrow(dim, 0, shard.length), expected)
                rest = shard.local_size - shard.length
                assert not weight.target.narrow(dim, shard.length, rest).any()


def test_no_weight_is_zero_and_deviations_are_as_configured():
    for weight in load().weight_shards():
        values, mean = weight.target, float("norm" in weight.name)
        assert values.all(), weight.name
        assert abs(values.mean() - mean) < 0.1, weight.name
        assert 0.01 < values.std() < 0.1, weight.name


def test_seed_and_name_choose_the_values():
    first, again, other = (load(seed=seed).model for seed in (1, 1, 2))
    weight = first.layers[0].mlp.down_proj.weight
    assert torch.equal(weight, again.layers[0].mlp.down_proj.weight)
    assert not torch.equal(weight, other.layers[0].mlp.down_proj.weight)
    assert not torch.equal(weight, first.layers[1].mlp.down_proj.weight)


@settings(deadline=None, max_examples=30)
@given(st.text(), st.integers(0, 2**31))
def test_any_name_and_seed_make_a_generator_seed(name, seed):
    source = DummySource(
        {name: (4, 2)}, std=1.0, seed=seed, device=torch.device("cpu"), dtype=torch.float32
    )
    assert torch.equal(source.read(name, 1, 1, 1), source.read(name, 0, 0, 4)[:, 1:])
