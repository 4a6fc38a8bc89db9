"""The small kernels of a layer and a step against the plain torch paths of ``ops``."""

import pytest
import torch
from compilations import compilations
from kernel_device import kernel_device, kernel_marks
from torch import Tensor

DEVICE = kernel_device()

from lockstep.worker.config import ScheduleConfig  # noqa: E402
from lockstep.worker.kernels import activation, embed, norm, ops, rope, store_kv  # noqa: E402
from lockstep.worker.warm_up import warm_up_plans  # noqa: E402

pytestmark = kernel_marks()
EPS = 1e-5


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def _assert_close(got: Tensor, expected: Tensor) -> None:
    # One rounding of a half type on either side, and a device's own square roots.
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[got.dtype]
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance)


def _check_norms(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows + size)
    wide, residual = _random(rows, size + 32, dtype=dtype), _random(rows, size, dtype=dtype)
    x, weight = wide[:, :size], _random(size, dtype=dtype)
    _assert_close(norm.rms_norm(x, weight, EPS), ops.rms_norm_torch(x, weight, EPS))
    normed, total = norm.add_rms_norm(x, residual, weight, EPS)
    assert total.equal(x + residual)
    _assert_close(normed, ops.rms_norm_torch(total, weight, EPS))


def _check_embedding(tokens: int, size: int, dtype: torch.dtype) -> None:
    table = _random(13, size, dtype=dtype)[1:-1]
    token_ids = torch.randint(0, 11, (tokens + 1,), device=DEVICE)[1:]
    assert embed.embed(token_ids, table).equal(table[token_ids])


def _check_activation(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = _random(rows, 2 * size, dtype=dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    _assert_close(activation.silu_and_mul(gate_up), expected)


def _rotated(x: Tensor, weight: Tensor | None, cos_sin: Tensor, positions: Tensor) -> Tensor:
    wide = x.float()
    if weight is not None:
        wide = ops.rms_norm_torch(wide, weight.float(), EPS)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    low, high = wide.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def _check_rope(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, *, norm_heads: bool
) -> None:
    torch.manual_seed(tokens + heads)
    qkv = _random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    angles = _random(50, dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.randint(0, 50, (tokens,), device=DEVICE)
    weights = (_random(dim, dtype=dtype), _random(dim, dtype=dtype)) if norm_heads else None
    expected = [
        _rotated(x, weight, cos_sin, positions)
        for x, weight in zip((q, k), weights or (None, None), strict=True)
    ]
    before = v.clone()
    rope.norm_rope_(q, k, positions, cos_sin, weights, EPS)
    _assert_close(q, expected[0])
    _assert_close(k, expected[1])
    assert v.equal(before)


def _check_store(tokens: int, heads: int, dim: int, block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens + heads)
    cache = torch.zeros(9, 2, 2, block_size, heads, dim, dtype=dtype, device=DEVICE)
    expected = cache.clone()
    qkv = _random(tokens, 3 * heads, dim, dtype=dtype)
    k, v = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
    slots = torch.randperm(9 * block_size, device=DEVICE)[:tokens]
    store_kv.store_kv(k, v, (cache[:, 1, 0], cache[:, 1, 1]), slots)
    expected[slots // block_size, 1, 0, slots % block_size] = k
    expected[slots // block_size, 1, 1, slots % block_size] = v
    assert cache.equal(expected)


@pytest.mark.parametrize("rows, size", [(1, 96), (3, 576), (2, 1000)])
def test_norms_match_torch(rows: int, size: int) -> None:
    _check_norms(rows, size, torch.float32)


@pytest.mark.parametrize("tokens, size", [(1, 96), (5, 1025)])
def test_embedding_takes_the_rows_of_the_ids(tokens: int, size: int) -> None:
    _check_embedding(tokens, size, torch.float32)


@pytest.mark.parametrize("rows, size", [(1, 96), (3, 1536)])
def test_activation_matches_torch(rows: int, size: int) -> None:
    _check_activation(rows, size, torch.float32)


@pytest.mark.parametrize("norm_heads", [False, True])
@pytest.mark.parametrize("heads, kv_heads, dim", [(9, 3, 64), (2, 1, 80), (4, 4, 96)])
def test_rope_matches_torch_and_leaves_v_alone(
    heads: int, kv_heads: int, dim: int, norm_heads: bool
) -> None:
    _check_rope(3, heads, kv_heads, dim, torch.float32, norm_heads=norm_heads)


@pytest.mark.parametrize("heads, kv_heads", [(18, 17), (6, 6), (2, 1)])
def test_rope_of_many_tokens_matches_torch(
    heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rope, "_MANY_TOKENS", 3)
    _check_rope(3, heads, kv_heads, 64, torch.float32, norm_heads=True)


@pytest.mark.parametrize("max_tokens", [100, 1023, 1024, 8192])
def test_a_start_runs_rope_with_every_number_of_heads_that_comes_later(max_tokens: int) -> None:
    schedule = ScheduleConfig(max_num_batched_tokens=max_tokens)
    plans = [plan.replicas[0] for plan in warm_up_plans(schedule, 97, max_tokens, 1)]
    at_start = {sum(len(chunk.token_ids) // 4 for chunk in plan.chunks) for plan in plans}
    for num_heads in (1, 8, 32):
        warm, later = (
            {rope._heads_a_program(tokens, num_heads) for tokens in sizes}
            for sizes in (at_start - {0}, range(1, max_tokens + 1))
        )
        assert warm == later


@pytest.mark.parametrize("heads, dim", [(1, 64), (3, 80)])
def test_store_writes_the_slots_of_its_layer_and_nothing_else(heads: int, dim: int) -> None:
    _check_store(5, heads, dim, 16, torch.float32)


def test_an_empty_batch_launches_nothing() -> None:
    empty = _random(0, 64)
    weight = _random(64)
    assert norm.rms_norm(empty, weight, EPS).shape == (0, 64)
    assert norm.add_rms_norm(empty, empty, weight, EPS)[0].shape == (0, 64)
    assert activation.silu_and_mul(empty).shape == (0, 32)
    no_ids = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert embed.embed(no_ids, weight[None]).shape == (0, 64)


def test_a_head_dim_that_is_not_contiguous_is_refused() -> None:
    cache = torch.zeros(2, 4, 3, 8).transpose(2, 3)
    with pytest.raises(ValueError, match="head_dim .* must be contiguous, got stride 8"):
        store_kv.cache_strides(cache)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [576, 1024, 2048, 4096, 5120, 8192])
def test_norms_and_activation_over_model_sizes(size: int, dtype: torch.dtype) -> None:
    for rows in (1, 7, 300):
        _check_norms(rows, size, dtype)
        _check_activation(rows, size // 2 * 3, dtype)
        _check_embedding(rows, size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_rope_and_store_over_model_sizes(dim: int, dtype: torch.dtype) -> None:
    for heads, kv_heads in ((9, 3), (16, 8), (32, 8), (5, 1)):
        for tokens in (1, 13):
            _check_rope(tokens, heads, kv_heads, dim, dtype, norm_heads=True)
            _check_rope(tokens, heads, kv_heads, dim, dtype, norm_heads=False)
            _check_store(tokens, kv_heads, dim, 32, dtype)


@pytest.mark.gpu
def test_every_number_of_rows_uses_the_kernels_of_a_small_and_a_large_one() -> None:
    def run(rows: int) -> None:
        _check_norms(rows, 208, torch.bfloat16)
        _check_activation(rows, 208, torch.bfloat16)
        _check_embedding(rows, 208, torch.bfloat16)
        _check_rope(rows, 7, 2, 48, torch.bfloat16, norm_heads=True)
        _check_store(min(rows, 100), 2, 48, 16, torch.bfloat16)

    with compilations() as at_start:
        run(2)
        run(2048)
    assert len(at_start) == 7
    with compilations() as later:
        for rows in (1, 3, 5, 8, 16, 17, 100, 1023, 1024, 3000):
            run(rows)
    assert later == []
