"""Collectives over real gloo processes: values, deaths, deadlines, the latched error."""

import os
import signal
import time

import pytest
import torch
from ranks import Rank, join, rank_outcomes, run_ranks

from lockstep.comm.collectives import Communicator
from lockstep.comm.errors import CommError, CommTimeout, PeerLost

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
_SHAPES = ((1, 1), (3, 5), (257, 64))


def _values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    source = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=source).to(dtype)
    return torch.randint(-99, 99, shape, generator=source)


def _sum_in_rank_order(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    total = _values(0, shape, dtype)
    for rank in range(1, size):
        total = total + _values(rank, shape, dtype)
    return total


def _tensor_cases(comm: Communicator, shape: tuple[int, ...], dtype: torch.dtype):
    own = _values(comm.rank, shape, dtype)
    total = _sum_in_rank_order(comm.size, shape, dtype)
    stacked = torch.stack([_values(rank, shape, dtype) for rank in range(comm.size)])
    last = comm.size - 1
    return {
        "all_reduce": (comm.all_reduce(own.clone()), total),
        "all_gather": (comm.all_gather(own), stacked),
        "all_gather into": (comm.all_gather(own, torch.zeros_like(stacked)), stacked),
        "broadcast": (comm.broadcast(own.clone(), src=last), _values(last, shape, dtype)),
        "all_reduce of a view": (comm.all_reduce(own.clone().t()), total.t()),
    }


def _object_cases(comm: Communicator):
    everybody = range(comm.size)
    return {
        "small objects": (comm.all_gather_object((comm.rank, 0)), [[r, 0] for r in everybody]),
        "large objects": (
            comm.all_gather_object("x" * 4000 * comm.rank), ["x" * 4000 * r for r in everybody]
        ),
        "broadcast_object": (comm.broadcast_object({"from": comm.rank}, src=1), {"from": 1}),
    }  # fmt: skip


def _table(rank: Rank) -> list[str]:
    """Every collective against its definition; returns what differs."""
    comm = join(rank).tp
    wrong = [
        f"{name} {shape} {dtype}"
        for dtype in _DTYPES
        for shape in _SHAPES
        for name, (found, expected) in _tensor_cases(comm, shape, dtype).items()
        if not torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    ]
    wrong += [name for name, (found, expected) in _object_cases(comm).items() if found != expected]
    comm.barrier(timeout_s=5)
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_give_what_they_say(size: int) -> None:
    assert run_ranks(_table, size, gloo=False) == [[]] * size


def test_group_of_one_returns_its_input() -> None:
    comm = Communicator.single(global_rank=5)
    x = torch.arange(6.0).view(2, 3)
    assert comm.all_reduce(x) is x and comm.broadcast(x, 0) is x
    assert torch.equal(comm.all_gather(x), x.unsqueeze(0))
    out = torch.empty(1, 2, 3)
    assert comm.all_gather(x, out) is out and torch.equal(out[0], x)
    assert comm.all_gather_object((1, "a")) == [[1, "a"]]
    assert comm.broadcast_object("a") == "a"
    assert (comm.rank, comm.size, comm.ranks) == (0, 1, (5,))
    comm.barrier()


_OPERATIONS = {
    "all_reduce": lambda comm: comm.all_reduce(torch.ones(8)),
    "all_gather": lambda comm: comm.all_gather(torch.ones(8)),
    "broadcast": lambda comm: comm.broadcast(torch.ones(8), src=2),
    "barrier": lambda comm: comm.barrier(timeout_s=10),
    "all_gather_object": lambda comm: comm.all_gather_object("x"),
}


def _victim_of(comm: Communicator, operation: str) -> tuple[type, int | str, float, bool]:
    """What a survivor saw, after how long, and whether the next operation fails at once."""
    started = time.monotonic()
    try:
        # A broadcast ends once sent: only a later one notices that a receiver is gone.
        for _ in range(100):
            _OPERATIONS[operation](comm)
    except CommError as error:
        seen = error
    waited = time.monotonic() - started
    with pytest.raises(CommError) as again:
        comm.all_reduce(torch.ones(1))
    who = seen.global_rank if isinstance(seen, PeerLost) else str(seen)
    return type(seen), who, waited, again.value is seen


def _peer_dies(rank: Rank, operation: str) -> tuple[type, int | str, float, bool]:
    comm = join(rank).tp
    comm.all_reduce(torch.ones(4))
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return _victim_of(comm, operation)


@pytest.mark.parametrize("operation", _OPERATIONS)
def test_dead_peer_is_named_and_latched_on_every_survivor(operation: str) -> None:
    *survivors, dead = rank_outcomes(_peer_dies, 3, operation, gloo=False)
    assert dead.exit_code == -signal.SIGKILL
    for outcome in survivors:
        kind, who, waited, latched = outcome.value
        assert (kind, who, latched) == (PeerLost, 2, True)
        assert waited < 10


def _peer_stops(rank: Rank) -> tuple[type, int | str, float, bool] | None:
    comm = join(rank, timeout_s=2.0).tp
    comm.all_reduce(torch.ones(4))
    if rank.rank == 1:
        time.sleep(5)
        return None
    return _victim_of(comm, "all_reduce")


def test_silent_peer_is_named_at_the_deadline() -> None:
    survivor, _ = run_ranks(_peer_stops, 2, gloo=False)
    kind, message, waited, latched = survivor
    assert kind is CommTimeout and "tp all_reduce: ranks [1] do not take part" in message
    assert latched and 2 <= waited < 5


def _error_is_set_when_abort_begins(rank: Rank) -> bool:
    group = join(rank).tp.group
    seen = []
    group.abort = lambda: seen.append(group.error)
    error = CommError("first")
    group.latch(error)
    group.latch(CommError("second"))
    return seen[0] is error and group.error is error


def test_error_is_latched_before_abort_and_never_replaced() -> None:
    assert run_ranks(_error_is_set_when_abort_begins, 2, gloo=False) == [True, True]


def _is_missing(rank: Rank) -> str:
    if rank.rank == 1:
        return ""
    with pytest.raises(CommTimeout) as caught:
        join(rank, timeout_s=1.0)
    return str(caught.value)


def test_rank_that_does_not_join_is_named() -> None:
    assert "ranks [1] did not show up within 1 s" in run_ranks(_is_missing, 3, gloo=False)[0]


def _gives_up(rank: Rank) -> tuple[int | str, float]:
    topology = join(rank)
    if rank.rank == 1:
        time.sleep(0.3)
        topology.give_up(KeyError("layer 3"))
        time.sleep(3)
        return str(topology.tp.group.error), 0.0
    kind, who, waited, _ = _victim_of(topology.tp, "barrier")
    return who, waited


def test_rank_that_gives_up_wakes_those_who_wait_and_tells_why() -> None:
    (who, waited), (own, _) = run_ranks(_gives_up, 2, gloo=False)
    assert who == 1 and waited < 3
    assert "gave up: 'layer 3'" in own
