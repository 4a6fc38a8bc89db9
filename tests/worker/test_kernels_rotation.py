"""Decode attention that norms and rotates on its way, against the rope kernel ahead of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from kernel_device import kernel_device, kernel_marks
from paged_cases import PagedCase, make_case
from torch import Tensor

DEVICE = kernel_device()

from lockstep.worker.attention.triton import TritonAttention  # noqa: E402
from lockstep.worker.kernels import rope  # noqa: E402
from lockstep.worker.kernels.warp_attention import WarpAttention  # noqa: E402
from lockstep.worker.rotation import Rotation  # noqa: E402

pytestmark = kernel_marks()
SHAPES = [  # num_heads, num_kv_heads, head_dim
    (6, 2, 16), (3, 1, 64), (9, 3, 80), (2, 2, 96), (4, 2, 128), (8, 1, 64),
]  # fmt: skip
MODEL_SHAPES = [(32, 8, 128), (16, 8, 128)]
CONTEXTS = [1, 37]
SEVERAL_CHUNKS = [600]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def a_case(
    shape: tuple[int, int, int], contexts: list[int], dtype: torch.dtype = torch.float32
) -> PagedCase:
    """One query a row; heads lie beside each other, as a fused projection leaves them."""
    num_heads, num_kv_heads, head_dim = shape
    case = make_case(
        [1] * len(contexts), contexts, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=16, dtype=dtype, device=DEVICE.type,
    )  # fmt: skip
    heads = torch.cat([case.q, case.k, case.v], dim=1)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return replace(case, q=q, k=k, v=v)


def a_rotation(case: PagedCase, *, norm: bool) -> Rotation:
    torch.manual_seed(5)
    head_dim, most = case.q.shape[-1], max(case.contexts)
    angles = torch.randn(most, head_dim // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(DEVICE)
    weights = tuple(torch.randn(head_dim).to(DEVICE, case.q.dtype) for _ in range(2))
    return Rotation(cos_sin, (weights[0], weights[1]) if norm else None, 1e-5)


def attend(
    case: PagedCase, rotation: Rotation | None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """(attention, what is in the cache then)."""
    out = torch.full_like(case.q, float("nan"))
    TritonAttention(case.sizes()).forward(
        case.q, case.k, case.v, case.cache.layer(0), case.metadata,
        scale=0.3, window=window, rotation=rotation, out=out,
    )  # fmt: skip
    return out, case.cache.storage


def both_ways(
    new_case: Callable[[], PagedCase], *, norm: bool, window: int | None = None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What ``attend`` gives on the way, and with the rope kernel before it."""
    rotation, before = a_rotation(new_case(), norm=norm), new_case()
    positions = torch.tensor(before.contexts, device=DEVICE) - 1
    rope.norm_rope_(before.q, before.k, positions, rotation.cos_sin, rotation.weights, rotation.eps)
    assert not before.q.equal(new_case().q)
    return attend(new_case(), rotation, window), attend(before, None, window)


def assert_same_bits(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def assert_close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    limit = TOLERANCE[found[0].dtype]
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotated_on_the_way_has_the_bits_of_rotated_before(shape: tuple[int, int, int]) -> None:
    assert_same_bits(*both_ways(lambda: a_case(shape, CONTEXTS), norm=False))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norm_before_it_may_round_its_sum_otherwise(shape: tuple[int, int, int]) -> None:
    assert_close(*both_ways(lambda: a_case(shape, CONTEXTS), norm=True))


def test_the_key_is_rotated_by_the_program_that_owns_it() -> None:
    def new_case() -> PagedCase:
        return a_case((2, 1, 16), SEVERAL_CHUNKS)

    assert_same_bits(*both_ways(new_case, norm=False, window=300))


def test_a_batch_beside_a_prompt_must_come_rotated() -> None:
    case = make_case([1, 3], [9, 3], device=DEVICE.type)
    assert not TritonAttention(case.sizes()).rotates(case.metadata, len(case.q))
    with pytest.raises(ValueError, match="rotation needs one token a row, got 4 and 2 rows"):
        attend(case, a_rotation(case, norm=False))


def test_only_rotating_rows_in_decode_form_go_by_warps() -> None:
    calls: list[int] = []
    mixed, rows = make_case([1, 3], [9, 3], device=DEVICE.type), a_case((2, 1, 16), [9, 3])
    for case in (mixed, rows):
        backend = TritonAttention(case.sizes())
        backend._by_warps = lambda q, *_, **__: calls.append(len(q))
        run = partial(
            backend.forward, case.q, case.k, case.v, case.cache.layer(0), case.metadata,
            scale=0.3, window=None, rotation=a_rotation(case, norm=False), out=case.q.clone(),
        )  # fmt: skip
        if case is mixed:
            with pytest.raises(ValueError, match="rotation needs one token a row"):
                run()
        else:
            run()
    assert calls == [2]


GPU_CASES = [
    *((shape, rows, torch.bfloat16) for shape in MODEL_SHAPES for rows in (8, 48, 200)),
    *((shape, 8, torch.bfloat16) for shape in [(14, 2, 64), (9, 3, 64), (8, 1, 80), (12, 12, 96)]),
    *((MODEL_SHAPES[0], 8, dtype) for dtype in (torch.float16, torch.float32)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape, rows, dtype", GPU_CASES, ids=str)
def test_rotation_over_model_shapes(
    shape: tuple[int, int, int], rows: int, dtype: torch.dtype
) -> None:
    """By every number of warps that a batch may have."""
    contexts = [208, 1, 16, 129, 700, 257, 33, 64] * (rows // 8)
    new_case = partial(a_case, shape, contexts, dtype)
    (out, cache), (wanted_out, wanted_cache) = both_ways(new_case, norm=False, window=100)
    torch.testing.assert_close(cache, wanted_cache, rtol=0, atol=0, equal_nan=True)
    # A product of float32 is a sum whose order is the compiler's; another kernel cuts otherwise.
    same = dtype is not torch.float32 and not WarpAttention.fits(new_case().sizes())
    limit = 0 if same else TOLERANCE[dtype]
    torch.testing.assert_close(out, wanted_out, rtol=limit, atol=limit)
    assert_close(*both_ways(new_case, norm=True))
