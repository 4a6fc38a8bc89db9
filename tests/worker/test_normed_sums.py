"""From a row-parallel product through a norm into a column-parallel one, at once or in turn."""

import pytest
import torch
from normed_cases import Norm
from one_request import OneRank
from torch import Tensor

from lockstep.parallel.linear import ColumnParallelLinear, GateUpParallelLinear, RowParallelLinear
from lockstep.parallel.placement import NormedSum, Placement, TorchLinear
from lockstep.parallel.shard import even_shard

IN, SIZE, OUT = 8, 16, 12


class NotingLinear(TorchLinear):
    """Keeps the names of the operations with a norm inside."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.taken.append("of_norm")
        return super().of_norm(summed, weight, bias)

    def gated_of_norm(
        self, summed: NormedSum, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.taken.append("gated_of_norm")
        return super().gated_of_norm(summed, weight, bias)


def _column(kind: str, place: Placement) -> ColumnParallelLinear:
    if kind == "gated":
        return GateUpParallelLinear(SIZE, OUT, place, bias=False)
    shard = even_shard(OUT, place.tp.size, 0, what="outputs")
    return ColumnParallelLinear(SIZE, {"proj": shard}, place, bias=True)


@pytest.mark.parametrize(
    ("size", "bias", "kind", "taken"),
    [
        (1, False, "plain", ["of_norm"]),
        (1, False, "gated", ["gated_of_norm"]),
        (1, True, "plain", []),
        (1, True, "gated", []),
        (2, False, "plain", []),
        (2, False, "gated", []),
    ],
)
def test_the_norm_is_inside_on_one_rank_without_a_bias(
    size: int, bias: bool, kind: str, taken: list[str]
) -> None:
    linear = NotingLinear()
    place = Placement(OneRank(size=size), torch.device("cpu"), torch.float32, linear)
    row, column = RowParallelLinear.even(IN, SIZE, place, bias=bias), _column(kind, place)
    for each in (*row.parameters(), *column.parameters()):
        each.normal_()
    x, residual, norm = torch.randn(3, IN // size), torch.randn(3, SIZE), Norm(torch.randn(SIZE))
    product, total = row.into(x, residual, norm, column)
    assert linear.taken == taken
    normed, expected_total = norm.add(row(x), residual)
    torch.testing.assert_close(total, expected_total)
    torch.testing.assert_close(product, column(normed))
