"""Every attention backend of a GPU against the reference, over the shapes of models.

Every two of GQA ratio, head size and block size meet; each shape runs contexts of 1 to 32768
tokens, alone and beside prompts, in windows. All dead slots and the padding block hold NaN.
"""

from dataclasses import replace

import pytest
import torch
from paged_cases import PagedCase, make_case
from torch import Tensor

from lockstep.worker.attention.base import create_backend
from lockstep.worker.attention.flashinfer import HEAD_DIMS as FLASHINFER_HEAD_DIMS
from lockstep.worker.attention.registry import find_backend

RATIOS = range(1, 9)
HEAD_DIMS = (64, 80, 96, 128)
BLOCK_SIZES = (16, 32, 64)
NUM_KV_HEADS = 2
SHAPES = [
    (ratio, head_dim, BLOCK_SIZES[(ratio + HEAD_DIMS.index(head_dim)) % len(BLOCK_SIZES)])
    for head_dim in HEAD_DIMS
    for ratio in RATIOS
]
BATCHES = {
    "decode": ([1] * 8, [1, 2, 63, 64, 129, 1000, 8191, 32768]),
    "mixed": ([1, 700, 0, 33, 1, 5], [32768, 2000, 1, 33, 1, 20000]),
}
WINDOWS = (None, 1, 100, 5000)
# Weights and outputs are rounded to eight bits of mantissa.
TOLERANCE = 1e-2


def test_every_two_values_of_ratio_head_size_and_block_size_meet() -> None:
    pairs = {(a, shape[a], b, shape[b]) for shape in SHAPES for a in range(3) for b in range(a)}
    axes = (RATIOS, HEAD_DIMS, BLOCK_SIZES)
    assert len(pairs) == sum(len(axes[a]) * len(axes[b]) for a in range(3) for b in range(a))


def need(name: str) -> None:
    if missing := find_backend(name).missing:
        pytest.skip(f"{name} needs {missing}")


def a_case(batch: str, ratio: int, head_dim: int, block_size: int, dtype: torch.dtype) -> PagedCase:
    """Queries, keys and values lie beside each other, as a fused projection leaves them."""
    case = make_case(
        *BATCHES[batch], num_heads=ratio * NUM_KV_HEADS, num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda",
    )  # fmt: skip
    case.cache.storage[0].fill_(float("nan"))
    fused = torch.cat([case.q, case.k, case.v], dim=1)
    q, k, v = fused.split([case.q.shape[1], NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    return replace(case, q=q, k=k, v=v)


def attend(name: str, case: PagedCase, window: int | None) -> Tensor:
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device="cuda")
    create_backend(name, case.sizes()).forward(
        case.q, case.k, case.v, case.cache.layer(0), case.metadata,
        scale=case.q.shape[-1] ** -0.5, window=window, out=out,
    )  # fmt: skip
    return out


def check(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for batch in BATCHES:
        case = a_case(batch, *shape, dtype)
        for window in WINDOWS:
            found, expected = attend(name, case, window), attend("reference", case, window)
            torch.testing.assert_close(
                found.float(), expected.float(), rtol=TOLERANCE, atol=TOLERANCE,
                msg=lambda text, at=(batch, window): f"{at}: {text}",
            )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton(shape: tuple[int, int, int]) -> None:
    check("triton", shape, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[1] in FLASHINFER_HEAD_DIMS], ids=str)
def test_flashinfer(shape: tuple[int, int, int]) -> None:
    need("flashinfer")
    check("flashinfer", shape, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_half_precision(name: str) -> None:
    need(name)
    check(name, (4, 128, 16), torch.float16)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_the_top_blocks_of_a_large_cache(name: str) -> None:
    """Offsets beyond 2**32 elements: a pool of 10 GB, the row in its last blocks."""
    need(name)
    small = make_case(
        [1, 20], [400, 20], num_heads=16, num_kv_heads=8, head_dim=128, block_size=16,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    num_used, block_shape = small.cache.storage.shape[0], small.cache.storage.shape[1:]
    num_blocks = (5 << 30) // block_shape.numel()
    storage = torch.empty((num_blocks, *block_shape), dtype=torch.bfloat16, device="cuda")
    shift = num_blocks - num_used
    storage[shift:] = small.cache.storage
    metadata = replace(
        small.metadata,
        slots=small.metadata.slots + shift * 16,
        block_table=small.metadata.block_table + shift,
    )
    out = torch.empty_like(small.q)
    create_backend(name, small.sizes()).forward(
        small.q, small.k, small.v, (storage[:, 0, 0], storage[:, 0, 1]), metadata,
        scale=128**-0.5, window=None, out=out,
    )  # fmt: skip
    assert out.equal(attend(name, small, None))
    torch.testing.assert_close(storage[shift:], small.cache.storage, rtol=0, atol=0, equal_nan=True)
