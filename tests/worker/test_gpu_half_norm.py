"""A norm half in each of the products around it, for 2 to 64 rows, against float32."""

import pytest
import torch
from compilations import compilations
from few_rows_cases import DEVICE, randn, weight_of
from kernel_device import kernel_device
from normed_cases import in_float32, normed_sum
from torch import Tensor
from torch.nn.functional import pad

kernel_device()

from lockstep.worker.kernels.few_rows import FewRows  # noqa: E402
from lockstep.worker.kernels.linear import KernelLinear  # noqa: E402
from lockstep.worker.kernels.linear_tiles import Ring, lanes_of  # noqa: E402

pytestmark = pytest.mark.gpu
# Input features, features of the norm, output features: with sums split in neither, in the first
# or in the second; and with tiles of 48 columns.
SHAPES = [(96, 320, 40), (2048, 200, 65), (96, 2056, 30), (256, 6144, 40)]


def _check(rows: int, shape: tuple[int, int, int], *, with_bias: bool) -> None:
    in_size, size, out_size = shape
    torch.manual_seed(rows + size)
    summed, weight = normed_sum(randn, rows, in_size, size), weight_of(2 * out_size, size)
    bias = randn(2 * out_size) if with_bias else None
    few_rows = FewRows(DEVICE)
    got = [few_rows.of_norm(summed, weight, bias, gated=gated) for gated in (False, True)]
    assert summed.norm.calls == 0
    total = few_rows(summed.x, summed.weight, None, gated=False) + summed.residual
    wanted = in_float32(total, summed.norm, weight, bias)
    for (product, found_total), expected in zip(got, wanted, strict=True):
        assert found_total.equal(total)
        assert product.dtype is torch.bfloat16
        torch.testing.assert_close(product.float(), expected, rtol=1e-2, atol=4e-2)
    assert few_rows.arrivals.eq(0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "rows, with_bias", [(2, True), (8, False), (16, False), (17, True), (64, False)]
)
def test_is_norm_and_product_in_float32(
    rows: int, shape: tuple[int, int, int], with_bias: bool
) -> None:
    _check(rows, shape, with_bias=with_bias)


@pytest.mark.parametrize("columns", [48, 64])
@pytest.mark.parametrize("rows, splits", [(5, 1), (5, 2), (20, 4)])
def test_squares_are_of_whole_sums_and_repeat_bit_for_bit(
    rows: int, splits: int, columns: int
) -> None:
    few_rows, (x, weight, residual, norm) = FewRows(DEVICE), normed_sum(randn, rows, 1024, 200)
    ring = Ring(columns, 128, 3, splits)
    first = few_rows.add(x, weight, residual, norm, ring=ring)
    num_tiles = -(-200 // columns)
    assert first.squares.shape == (num_tiles, lanes_of(rows))
    squares = pad(first.total.float().square(), (0, num_tiles * columns - 200))
    of_tiles = squares.view(rows, num_tiles, columns).sum(2).T
    torch.testing.assert_close(first.squares[:, :rows], of_tiles)
    for _ in range(20):
        again = few_rows.add(x, weight, residual, norm, ring=ring)
        assert again.total.equal(first.total) and again.weighed.equal(first.weighed)
        assert again.squares.equal(first.squares)


@pytest.fixture
def nan_where_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is new holds NaN, not what happens to be there."""

    def empty(*args: object, **kwargs: object) -> Tensor:
        made = torch.zeros(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.usefixtures("nan_where_nothing_is")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [5, 33])
def test_rows_of_nan_beside_and_behind_leave_the_others_as_they_are(rows: int, gated: bool) -> None:
    few_rows, weight = FewRows(DEVICE), weight_of(80, 320)
    summed = normed_sum(randn, 64, 520, 320)
    x, residual = summed.x.clone(), summed.residual.clone()
    x[rows:], residual[rows:] = torch.nan, torch.nan
    live = summed._replace(x=x[:rows], residual=residual[:rows])
    product, total = few_rows.of_norm(live, weight, None, gated=gated)
    assert product.isfinite().all() and total.isfinite().all()
    x[1], residual[2] = torch.nan, torch.nan
    beside, beside_total = few_rows.of_norm(live, weight, None, gated=gated)
    others = [row for row in range(rows) if row not in (1, 2)]
    assert beside[others].equal(product[others])
    assert beside_total[others].equal(total[others])
    assert beside[1:3].isnan().all()


@pytest.mark.parametrize("shape", [(4096, 4096, 6144), (14336, 4096, 6144), (2048, 1024, 3072)])
def test_model_shapes_while_many_programs_race(shape: tuple[int, int, int]) -> None:
    in_size, size, out_size = shape
    for rows in (2, 8, 16, 32, 64):
        _check(rows, shape, with_bias=False)
        few_rows, summed = FewRows(DEVICE), normed_sum(randn, rows, in_size, size)
        weight = weight_of(2 * out_size, size)
        first, total = few_rows.of_norm(summed, weight, None, gated=True)
        for _ in range(100):
            again, again_total = few_rows.of_norm(summed, weight, None, gated=True)
            assert again.equal(first) and again_total.equal(total)


def test_numbers_of_rows_share_the_kernels_of_their_lanes() -> None:
    linear, weight = KernelLinear(DEVICE), weight_of(72, 208)

    def run(rows: int) -> None:
        linear.of_norm(normed_sum(randn, rows, 104, 208), weight)

    with compilations() as at_start:
        for rows in (2, 9, 17, 33):
            run(rows)
    assert len(at_start) == 8
    with compilations() as later:
        for rows in range(2, 65):
            run(rows)
    assert later == []
