"""Attention by warps: against dense attention, and what must not show in a row's bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from compilations import compilations
from kernel_device import kernel_device
from paged_cases import PagedCase, make_case
from torch import Tensor

kernel_device()

from lockstep.worker.attention.base import AttentionSizes  # noqa: E402
from lockstep.worker.attention.triton import TritonAttention  # noqa: E402
from lockstep.worker.kernels import warp_attention  # noqa: E402
from lockstep.worker.kernels.warp_attention import WarpAttention  # noqa: E402
from lockstep.worker.kernels.warp_share import Share  # noqa: E402
from lockstep.worker.rotation import Rotation  # noqa: E402

pytestmark = pytest.mark.gpu

SCALE = 0.3
CONTEXTS = [1, 2, 17, 33, 64, 65, 208, 256, 257, 300, 513, 700, 1500, 2049, 5000, 17000]
SHAPES = [  # num_heads, num_kv_heads, head_dim, block_size
    (32, 8, 128, 16), (16, 8, 128, 16), (16, 4, 128, 32), (4, 4, 128, 8), (9, 3, 64, 16),
    (14, 2, 64, 64), (7, 1, 128, 4), (16, 1, 128, 128), (32, 2, 64, 16),
]  # fmt: skip
SHARES = [
    Share(1, 1, 1),
    Share(1, 2, 2),
    Share(1, 4, 2),
    Share(1, 4, 1),
    Share(2, 8, 1),
    Share(16, 8, 1),
]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def a_case(
    shape: tuple[int, int, int, int],
    contexts: list[int] = CONTEXTS,
    dtype: torch.dtype = torch.bfloat16,
) -> PagedCase:
    """Heads lie beside each other, as a fused projection leaves them; dead slots hold NaN."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    case = make_case(
        [1] * len(contexts), contexts, num_heads=num_heads, num_kv_heads=num_kv_heads,
        head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda",
    )  # fmt: skip
    case.cache.storage[0].fill_(float("nan"))
    heads = torch.cat([case.q, case.k, case.v], dim=1)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return replace(case, q=q, k=k, v=v)


def a_rotation(case: PagedCase, *, norm: bool) -> Rotation:
    torch.manual_seed(5)
    head_dim = case.q.shape[-1]
    angles = torch.randn(max(case.contexts), head_dim // 2, device="cuda")
    weights = tuple(torch.randn(head_dim, device="cuda").to(case.q.dtype) for _ in range(2))
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).contiguous()
    return Rotation(cos_sin, (weights[0], weights[1]) if norm else None, 1e-5)


def turned(x: Tensor, case: PagedCase, rotation: Rotation, which: int) -> Tensor:
    """x [rows, heads, dims], normed and rotated in float32."""
    wide = x.float()
    if rotation.weights is not None:
        square = wide.square().mean(-1, keepdim=True)
        wide = wide * (square + rotation.eps).rsqrt() * rotation.weights[which].float()
    factors = rotation.cos_sin[torch.tensor(case.contexts, device="cuda") - 1]
    cos, sin = factors[:, None, :].chunk(2, -1)
    low, high = wide.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def rotated(case: PagedCase, rotation: Rotation) -> PagedCase:
    """What attention without a rotation must see."""
    q, k = turned(case.q, case, rotation, 0), turned(case.k, case, rotation, 1)
    dense = [
        (torch.cat([keys[:-1], k[row : row + 1]]), values)
        for row, (keys, values) in enumerate(case.dense)
    ]
    return replace(case, q=q, k=k, dense=dense)


def attend(case: PagedCase, rotation: Rotation, window: int | None = None) -> Tensor:
    """Twice, since the second meets what the first has left."""
    out = torch.full(case.q.shape, float("nan"), dtype=case.q.dtype, device="cuda")
    kernel = WarpAttention(case.sizes())
    for _ in range(2):
        kernel(
            case.q, case.k, case.v, case.cache.layer(0), case.metadata,
            scale=SCALE, window=window, rotation=rotation, out=out,
        )  # fmt: skip
    assert kernel.arrivals.eq(0).all()
    return out


@contextmanager
def shared(share: Share) -> Iterator[None]:
    """All batches are shared out like this, with room for it."""
    with (
        patch.object(warp_attention, "share_of", return_value=share),
        patch.object(warp_attention, "most_split_rows", side_effect=lambda rows, *_: rows),
    ):
        yield


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_dense_attention(
    shape: tuple[int, int, int, int], dtype: torch.dtype, norm: bool
) -> None:
    case = a_case(shape, dtype=dtype)
    rotation = a_rotation(case, norm=norm)
    for window in (None, 1, 100, 700):
        got = attend(case, rotation, window).float()
        expected = rotated(case, rotation).expected(SCALE, window)
        torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stores_the_rotated_key_and_the_value_and_nothing_else(
    shape: tuple[int, int, int, int],
) -> None:
    case = a_case(shape)
    rotation, block_size = a_rotation(case, norm=False), shape[3]
    expected = case.cache.storage.clone()
    k = turned(case.k, case, rotation, 1)
    for row, slot in enumerate(case.metadata.slots.tolist()):
        block, offset = divmod(slot, block_size)
        expected[block, 0, 0, offset], expected[block, 0, 1, offset] = k[row], case.v[row]
    attend(case, rotation)
    # A fused product of the rotation may be rounded otherwise; values are copies.
    torch.testing.assert_close(case.cache.storage, expected, rtol=1e-2, atol=1e-2, equal_nan=True)
    same = case.cache.storage.view(torch.int16) == expected.view(torch.int16)
    assert same[:, :, 1].all()
    assert (~same).sum() <= case.k.numel()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neither_programs_nor_warps_show(shape: tuple[int, int, int, int], norm: bool) -> None:
    case = a_case(shape)
    rotation = a_rotation(case, norm=norm)
    for window in (None, 300):
        outs = []
        for share in SHARES:
            with shared(share):
                outs.append(attend(case, rotation, window))
        for out in outs[1:]:
            assert out.equal(outs[0])


@pytest.mark.parametrize("rows", [2, 16, 64, 200])
def test_a_row_has_the_same_bits_in_batches_of_any_size(rows: int) -> None:
    shape, contexts = SHAPES[0], (CONTEXTS[:-1] * 14)[:rows]
    case = a_case(shape, contexts)
    rotation = a_rotation(case, norm=True)
    together = attend(case, rotation)
    for row in range(min(rows, 15)):
        assert attend(case.alone(row), rotation).equal(together[row : row + 1])


@pytest.mark.parametrize("rows", [1, 4, 40, 70, 150])
def test_a_captured_call_follows_contexts_and_repeats_bit_for_bit(rows: int) -> None:
    """Replayed for other lengths than those at capture, against a fresh eager call."""
    case = a_case(SHAPES[1], ([3000, 1, 700, 129, 40] * 30)[:rows])
    rotation, kernel = a_rotation(case, norm=True), WarpAttention(case.sizes())
    lengths, out = (
        case.metadata.context_lens.clone(),
        torch.zeros(case.q.shape, dtype=case.q.dtype, device="cuda"),
    )

    def call(into: Tensor) -> None:
        kernel(
            case.q, case.k, case.v, case.cache.layer(0), case.metadata,
            scale=SCALE, window=None, rotation=rotation, out=into,
        )  # fmt: skip

    call(out)
    graph = torch.cuda.CUDAGraph()
    case.metadata.context_lens.fill_(1)
    with torch.cuda.graph(graph):
        call(out)
    for _ in range(20):
        for wanted in (lengths, torch.ones_like(lengths), lengths // 2 + 1):
            case.metadata.context_lens.copy_(wanted)
            out.fill_(float("nan"))
            graph.replay()
            expected = torch.empty_like(out)
            call(expected)
            assert out.equal(expected)
            assert out.isfinite().all()


def test_batches_of_all_sizes_use_the_kernels_of_powers_of_two() -> None:
    # No other test has this shape, so what it needs is not compiled yet.
    shape = (20, 5, 64, 16)
    with compilations() as at_start:
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            case = a_case(shape, [1] * rows)
            attend(case, a_rotation(case, norm=False))
    assert sum("warp_attention" in name for name in at_start) == 4
    with compilations() as later:
        for rows in (1, 3, 7, 17, 40, 60, 100, 200):
            case = a_case(shape, [17 * row + 1 for row in range(rows)])
            attend(case, a_rotation(case, norm=False), window=40)
    assert later == []


def test_the_backend_takes_it_for_rotating_rows() -> None:
    """Its bits are those of the kernel alone; the general kernel cuts contexts otherwise."""
    case = a_case(SHAPES[0])
    rotation = a_rotation(case, norm=False)
    out = torch.zeros(case.q.shape, dtype=case.q.dtype, device="cuda")
    TritonAttention(case.sizes()).forward(
        case.q, case.k, case.v, case.cache.layer(0), case.metadata,
        scale=SCALE, window=None, rotation=rotation, out=out,
    )  # fmt: skip
    assert out.equal(attend(case, rotation))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float32},
        {"head_dim": 96},
        {"num_heads": 40},
        {"device": torch.device("cpu")},
    ],
    ids=str,
)
def test_other_heads_are_left_to_the_general_kernel(change: dict[str, object]) -> None:
    sizes = AttentionSizes(32, 2, 128, 16, 8, 8, 4096, torch.bfloat16, torch.device("cuda"))
    assert WarpAttention.fits(sizes)
    assert not WarpAttention.fits(replace(sizes, **change))
