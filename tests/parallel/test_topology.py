"""Groups along the axes, over real gloo ranks: sums tell who is in them."""

import pytest
import torch
from ranks import Rank, join, run_ranks

from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.rank_spec import RankSpec
from lockstep.parallel.topology import Topology


def _sums(rank: Rank, dp_lockstep: str) -> dict[str, float]:
    """Sum of 10 ** global_rank over each communicator."""
    topology = join(rank, tp_size=2, dp_size=2, dp_lockstep=dp_lockstep)
    found = {
        name: getattr(topology, name).all_reduce(torch.tensor([10.0**rank.rank])).item()
        for name in ("tp", "dp", "lockstep", "world")
    }
    topology.world.barrier()
    topology.destroy()
    return found


@pytest.mark.parametrize(
    "dp_lockstep, dp, lockstep",
    [
        ("always", (101, 1010, 101, 1010), (1111,) * 4),
        ("auto", (1, 10, 100, 1000), (11, 11, 1100, 1100)),
    ],
)
def test_each_axis_joins_its_ranks(dp_lockstep: str, dp: tuple, lockstep: tuple) -> None:
    found = run_ranks(_sums, 4, dp_lockstep, gloo=False)
    assert [sums["tp"] for sums in found] == [11, 11, 1100, 1100]
    assert tuple(sums["dp"] for sums in found) == dp
    assert tuple(sums["lockstep"] for sums in found) == lockstep
    assert [sums["world"] for sums in found] == [1111] * 4


def _shared(rank: Rank) -> tuple[int, int, dict[str, str], bool]:
    topology = join(rank, tp_size=2)
    with topology.ledger.recorded() as entries:
        topology.tp.all_reduce(torch.ones(3))
        topology.tp.all_gather(torch.ones(2, dtype=torch.int64))
    ops = [(entry.op, entry.elements, entry.dtype, entry.group) for entry in entries]
    expected = [("all_reduce", 3, "float32", "tp"), ("all_gather", 2, "int64", "tp")]
    same = topology.tp is topology.lockstep is topology.world
    return len(topology.communicators), topology.dp.size, topology.choices(), same, ops == expected


def test_equal_sets_of_ranks_share_a_group_and_a_ledger() -> None:
    choices = {"all_reduce/tp": "gloo"}
    assert run_ranks(_shared, 2, gloo=False) == [(2, 1, choices, True, True)] * 2


def test_one_rank_alone_needs_nothing() -> None:
    spec = RankSpec(global_rank=0, world_size=1, dp_rank=0, tp_rank=0)
    topology = Topology.create(spec, ParallelConfig())
    assert topology.world.size == topology.lockstep.size == 1
    topology.give_up(ValueError())
    topology.retire()
    topology.destroy()


@pytest.mark.parametrize(
    "spec, message",
    [
        (dict(world_size=2, tp_rank=0), r"world_size must be tp_size \* dp_size = 4, got 2"),
        (dict(world_size=4, tp_rank=0), r"of global_rank 1 must be \(0, 1\), got \(0, 0\)"),
    ],
)
def test_spec_that_does_not_fit_is_refused(spec: dict, message: str) -> None:
    config = ParallelConfig(tp_size=2, dp_size=2)
    with pytest.raises(ValueError, match=message):
        Topology.create(RankSpec(global_rank=1, dp_rank=0, **spec), config)
