"""A norm half in each of the products around it, for 2 to 64 rows: numbers, and when it is used."""

from collections.abc import Callable

import pytest
import torch
from compilations import compilations
from kernel_device import kernel_device, kernel_marks
from normed_cases import in_float32, normed_sum, products
from torch import Tensor

DEVICE = kernel_device()

from lockstep.parallel.placement import NormedSum  # noqa: E402
from lockstep.worker.kernels.few_rows import FewRows  # noqa: E402
from lockstep.worker.kernels.linear import FewRowsLinear, KernelLinear  # noqa: E402
from lockstep.worker.kernels.linear_tiles import Tiles  # noqa: E402

pytestmark = kernel_marks()
# The interpreter has no arithmetic in bfloat16; numbers are small enough for the other half type.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
LIMIT = 1e-2 if DEVICE.type == "cuda" else 1e-3
# Input features, features of the norm, output features: with sums split in either or both.
SHAPES = [(96, 320, 40), (1024, 200, 65), (96, 1000, 30)]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def _weight(out_size: int, in_size: int) -> Tensor:
    return _random(out_size, in_size) * in_size**-0.5


def _check(rows: int, shape: tuple[int, int, int], *, with_bias: bool) -> None:
    in_size, size, out_size = shape
    torch.manual_seed(rows + size)
    summed, weight = normed_sum(_random, rows, in_size, size), _weight(2 * out_size, size)
    bias = _random(2 * out_size) if with_bias else None
    few_rows = FewRows(DEVICE)
    got = [few_rows.of_norm(summed, weight, bias, gated=gated) for gated in (False, True)]
    assert summed.norm.calls == 0
    total = few_rows(summed.x, summed.weight, None, gated=False) + summed.residual
    wanted = in_float32(total, summed.norm, weight, bias)
    for (product, found_total), expected in zip(got, wanted, strict=True):
        assert found_total.equal(total)
        assert product.dtype is DTYPE
        torch.testing.assert_close(product.float(), expected, rtol=LIMIT, atol=4 * LIMIT)
    assert few_rows.arrivals.eq(0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "rows, with_bias", [(2, True), (8, False), (16, False), (17, True), (64, False)]
)
def test_is_norm_and_product_in_float32(
    rows: int, shape: tuple[int, int, int], with_bias: bool
) -> None:
    _check(rows, shape, with_bias=with_bias)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_squares_are_of_whole_sums_and_repeat_bit_for_bit(splits: int) -> None:
    few_rows, (x, weight, residual, norm) = FewRows(DEVICE), normed_sum(_random, 5, 1024, 200)
    tiles = Tiles(64, 128, splits)
    first = few_rows.add(x, weight, residual, norm, tiles=tiles)
    columns = torch.nn.functional.pad(first.total.float().square(), (0, 56)).view(5, 4, 64)
    torch.testing.assert_close(first.squares[:, :5], columns.sum(2).T)
    for _ in range(3):
        again = few_rows.add(x, weight, residual, norm, tiles=tiles)
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
    few_rows, weight = FewRows(DEVICE), _weight(80, 320)
    summed = normed_sum(_random, 64, 520, 320)
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


def _half(rows: int, size: int = 64, dtype: torch.dtype = torch.bfloat16) -> NormedSum:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    return normed_sum(random, rows, 32, size)


def _strided(summed: NormedSum) -> NormedSum:
    wide = torch.cat([summed.residual, summed.residual], dim=1)
    return summed._replace(residual=wide[:, : summed.residual.shape[1]])


@pytest.mark.parametrize(
    "make, served",
    [
        (lambda: _half(2), True),
        (lambda: _half(64), True),
        (lambda: _half(64, 8192), True),
        (lambda: _half(1), False),
        (lambda: _half(65), False),
        (lambda: _half(64, 8200), False),
        (lambda: _half(17, 8200), True),
        (lambda: _half(16, 2048), True),
        (lambda: _half(16, 2056), False),
        (lambda: _half(4, 68), False),
        (lambda: _half(4, dtype=torch.float16), False),
        (lambda: _half(4, dtype=torch.float32), False),
        (lambda: _strided(_half(4)), False),
    ],
    ids=[
        "two", "most", "wide", "one", "many", "squares", "long", "narrow", "few_of_more",
        "unaligned", "float16", "float32", "strided",
    ],
)  # fmt: skip
def test_what_is_served(
    make: Callable[[], NormedSum], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed, calls = make(), list[bool]()

    def of_norm(self: FewRowsLinear, *args: object, gated: bool) -> tuple[Tensor, Tensor]:
        calls.append(gated)
        return summed.residual, summed.residual

    monkeypatch.setattr(FewRowsLinear, "of_norm", of_norm)
    weight = summed.weight.new_zeros(16, summed.residual.shape[1])
    assert FewRowsLinear(DEVICE).serves_norm(summed, weight) is served
    if served:
        products(KernelLinear(DEVICE), summed, weight, None)
    assert calls == ([False, True] if served else [])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096, 6144), (14336, 4096, 6144), (2048, 1024, 3072)])
def test_model_shapes_while_many_programs_race(shape: tuple[int, int, int]) -> None:
    in_size, size, out_size = shape
    for rows in (2, 8, 16, 32, 64):
        _check(rows, shape, with_bias=False)
        few_rows, summed = FewRows(DEVICE), normed_sum(_random, rows, in_size, size)
        weight = _weight(2 * out_size, size)
        first, total = few_rows.of_norm(summed, weight, None, gated=True)
        for _ in range(100):
            again, again_total = few_rows.of_norm(summed, weight, None, gated=True)
            assert again.equal(first) and again_total.equal(total)


@pytest.mark.gpu
def test_numbers_of_rows_share_the_kernels_of_their_lanes() -> None:
    linear, weight = KernelLinear(DEVICE), _weight(72, 208)

    def run(rows: int) -> None:
        linear.of_norm(normed_sum(_random, rows, 104, 208), weight)

    with compilations() as at_start:
        for rows in (2, 17, 33):
            run(rows)
    assert len(at_start) == 6
    with compilations() as later:
        for rows in range(2, 65):
            run(rows)
    assert later == []
