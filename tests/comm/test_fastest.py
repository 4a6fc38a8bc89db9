"""The table that measured times give."""

import pytest

from lockstep.comm.all_reduce.fastest import fastest, slowest_of
from lockstep.comm.all_reduce.table import parse_table
from lockstep.comm.messages import SumTimes

KIB = 1 << 10


def rows(**times: list[float | None]) -> list[SumTimes]:
    """At 1, 2, 4 ... KiB; None where an algorithm does not serve."""
    count = len(next(iter(times.values())))
    return [
        SumTimes(
            KIB << i, {name: took[i] for name, took in times.items() if took[i] is not None}
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "times, table",
    [
        (dict(nccl=[9, 9], a=[5, 5], b=[6, 6]), "a:2048,nccl"),
        (dict(nccl=[9, 9, 9], a=[5, 8, 12], b=[6, 6, 10]), "a:1024,b:2048,nccl"),
        (dict(nccl=[9, 9, 9], a=[5, 6.0, 7], b=[6, 5.9, 5]), "a:2048,b:4096,nccl"),
        (dict(nccl=[4, 9, 9], a=[5, 5, None]), "nccl:1024,a:2048,nccl"),
        (dict(nccl=[9, 9], a=[5, 5], fused=[3, 6]), "fused:1024,a:2048,nccl"),
        (dict(nccl=[9, 9, 9], fused=[3, 10, 3]), "fused:1024,nccl"),
        (dict(nccl=[9, 9], fused=[10, 3]), "nccl"),
        (dict(nccl=[9, 9, 9], fused=[3, 3, None]), "fused:2048,nccl"),
        (dict(nccl=[9]), "nccl"),
    ],
)
def test_the_fastest_serves_each_size(times, table: str) -> None:
    found = fastest(rows(**times), "nccl")
    assert ",".join(map(str, found)) == table and parse_table(table) == found


def test_a_group_takes_as_long_as_its_slowest_rank() -> None:
    one, other = rows(nccl=[9, 4], a=[1, None]), rows(nccl=[7, 6], a=[2, 2])
    assert slowest_of([one, other]) == rows(nccl=[9, 6], a=[2, None])
