"""Products of 2 to 128 rows against float32 ones, and what must not change a row's sum."""

import pytest
import torch
import torch.nn.functional as F
from compilations import compilations
from few_rows_cases import DEVICE, amid_nan, around, between_nan, randn, weight_of
from kernel_device import kernel_device
from torch import Tensor

kernel_device()

from lockstep.worker.kernels.few_rows import FewRows  # noqa: E402
from lockstep.worker.kernels.linear import FewRowsLinear  # noqa: E402
from lockstep.worker.kernels.linear_tiles import MAX_ROWS, Ring  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS = [(2, False), (8, True), (9, True), (16, False), (17, True), (33, True), (65, False)]
# [out_size, in_size]
SHAPES = {
    "less than a tile": (40, 96),
    "a tile": (64, 128),
    "a split sum": (65, 2048),
    "four parts that fill rings again": (6, 4616),
    "48 columns": (6152, 264),
    "56 columns, rings filled again": (7001, 1032),
    "two programs a multiprocessor": (17000, 200),
}
RINGS = [
    Ring(48, 128, 4), Ring(56, 64, 2), Ring(64, 64, 6), Ring(64, 128, 2),
    Ring(112, 64, 3, tile_n=128), Ring(96, 128, 2, tile_n=128),
]  # fmt: skip


def _exact(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool) -> Tensor:
    product = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    gate, up = product.tensor_split(2, dim=1)
    return F.silu(gate) * up if gated else product


def _check(
    rows: int,
    shape: tuple[int, int],
    ring: Ring | None = None,
    *,
    with_bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    out_size, in_size = shape
    torch.manual_seed(rows + out_size)
    few_rows, x = FewRows(DEVICE), randn(rows, in_size, dtype=dtype)
    limit = 1e-3 if dtype is torch.float16 else 1e-2
    for gated in (False, True):
        weight = weight_of(out_size * (1 + gated), in_size, dtype)
        bias = randn(len(weight), dtype=dtype) if with_bias else None
        got = few_rows(x, weight, bias, gated=gated, ring=ring)
        assert got.dtype is dtype and got.shape == (rows, out_size)
        expected = _exact(x, weight, bias, gated=gated)
        torch.testing.assert_close(got.float(), expected, rtol=limit, atol=2 * limit)
    assert few_rows.arrivals.eq(0).all()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rows, with_bias", [*ROWS, (MAX_ROWS, True)])
def test_matches_float32(rows: int, shape: tuple[int, int], with_bias: bool) -> None:
    _check(rows, shape, with_bias=with_bias)


@pytest.mark.parametrize("in_size", [8, 64, 136, 1000])
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_any_ring_takes_any_number_of_tiles(ring: Ring, in_size: int) -> None:
    for rows in (5, 40):
        _check(rows, (200, in_size), ring)


@pytest.mark.parametrize("shape", [(65, 2048), (200, 600)])
@pytest.mark.parametrize("rows", [3, 20, 100])
def test_the_other_half_type_is_more_exact(rows: int, shape: tuple[int, int]) -> None:
    _check(rows, shape, with_bias=True, dtype=torch.float16)


@pytest.mark.parametrize(
    "shape",
    [(6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (3072, 1024), (1024, 3072)],
    ids=str,
)
def test_shapes_of_models(shape: tuple[int, int]) -> None:
    for rows in (8, 16, 64):
        _check(rows, shape)


@pytest.mark.parametrize("rows", [2, 9, 17, 33, MAX_ROWS])
def test_float32_results_are_not_rounded_to_a_half_type(rows: int) -> None:
    x, weight, wide = randn(rows, 640), weight_of(90, 640), around(rows, 90, dtype=torch.float32)
    FewRowsLinear(DEVICE).in_float32(x, weight, wide[8:-8])
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(wide[8:-8].double(), exact, rtol=1e-5, atol=1e-5)
    assert wide[:8].isnan().all() and wide[-8:].isnan().all()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 3, 4])
def test_splits_of_the_sum_are_added_in_order_and_repeat_bit_for_bit(
    splits: int, gated: bool
) -> None:
    few_rows, ring = FewRows(DEVICE), Ring(64, 128, 3, splits)
    x, weight = randn(16, 1024), weight_of(2100 * (1 + gated), 1024)
    first = few_rows(x, weight, None, gated=gated, ring=ring)
    expected = _exact(x, weight, None, gated=gated)
    torch.testing.assert_close(first.float(), expected, rtol=1e-2, atol=2e-2)
    for _ in range(200):
        assert few_rows(x, weight, None, gated=gated, ring=ring).equal(first)
    assert few_rows.arrivals.eq(0).all()


@pytest.mark.parametrize("rows, some", [(8, slice(2)), (16, slice(5, 15)), (32, slice(11, 31))])
def test_a_row_does_not_depend_on_the_rows_beside_it(rows: int, some: slice) -> None:
    linear, x, weight = FewRowsLinear(DEVICE), randn(rows, 600), weight_of(100, 600)
    together = linear(x, weight)
    assert linear(x[some], weight).equal(together[some])
    x[3 if some.start else 7] = torch.nan
    assert linear(x, weight)[some].equal(together[some])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ring", [None, *RINGS], ids=str)
def test_a_feature_does_not_depend_on_those_beside_it(ring: Ring | None, gated: bool) -> None:
    few_rows, x, weight = FewRows(DEVICE), randn(9, 264), weight_of(200 * (1 + gated), 264)
    before = few_rows(x, weight, None, gated=gated, ring=ring)
    spoilt = [47, 63, 96, 199]
    weight[spoilt[:2]] = torch.nan
    weight[-200:][spoilt[2:]] = torch.nan
    after = few_rows(x, weight, None, gated=gated, ring=ring)
    others = [feature for feature in range(200) if feature not in spoilt]
    assert after[:, others].equal(before[:, others])
    assert after[:, spoilt].isnan().all()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ring", [None, *RINGS], ids=str)
@pytest.mark.parametrize("rows", [5, 33])
def test_nothing_outside_is_read_into_results_or_written(
    rows: int, ring: Ring | None, gated: bool
) -> None:
    few_rows, x, weight = FewRows(DEVICE), randn(rows, 200), weight_of(90 * (1 + gated), 200)
    bias, wide = randn(len(weight)), around(rows, 90)
    expected = few_rows(x, weight, bias, gated=gated, ring=ring)
    got = few_rows(
        amid_nan(x), between_nan(weight), between_nan(bias), gated=gated, ring=ring, out=wide[8:-8]
    )
    assert got.equal(expected) and got.isfinite().all()
    assert wide[:8].isnan().all() and wide[-8:].isnan().all()


def test_numbers_of_rows_share_the_kernel_of_their_lanes() -> None:
    linear, weight = FewRowsLinear(DEVICE), weight_of(72, 208)
    with compilations() as at_start:
        for rows in (1, 2, 9, 17, 33, 65):
            linear(randn(rows, 208), weight)
    assert len(at_start) == 6
    with compilations() as later:
        for rows in range(1, MAX_ROWS + 1):
            linear(randn(rows, 208), weight)
    assert later == []
