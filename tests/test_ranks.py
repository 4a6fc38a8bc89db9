import os
import time

import pytest
import torch
from ranks import Rank, RankDied, rank_outcomes, run_ranks
from torch import distributed


def _sum_of_ranks(rank: Rank, factor: int) -> tuple[int, int, float]:
    total = torch.tensor([float(rank.rank * factor)])
    distributed.all_reduce(total)
    return rank.rank, os.getpid(), total.item()


def _fails_on_one(rank: Rank) -> None:
    if rank.rank == 1:
        raise KeyError("only rank 1")
    time.sleep(60)


def _dies_on_one(rank: Rank) -> str:
    if rank.rank == 1:
        os.kill(os.getpid(), 9)
    return "alive"


def _sleeps(rank: Rank) -> None:
    time.sleep(60)


def test_ranks_are_processes_with_gloo_and_give_results_in_order() -> None:
    results = run_ranks(_sum_of_ranks, 3, 10)
    assert [number for number, _, _ in results] == [0, 1, 2]
    assert len({pid for _, pid, _ in results} | {os.getpid()}) == 4
    assert [total for _, _, total in results] == [30.0] * 3


def test_first_error_is_raised_with_its_rank() -> None:
    started = time.monotonic()
    with pytest.raises(KeyError, match="only rank 1") as caught:
        run_ranks(_fails_on_one, 2)
    assert "raised on rank 1" in caught.value.__notes__[0]
    assert "_fails_on_one" in caught.value.__notes__[0]
    assert time.monotonic() - started < 20


def test_death_is_an_error_or_an_outcome() -> None:
    with pytest.raises(RankDied, match="rank 1 exited with code -9"):
        run_ranks(_dies_on_one, 2, gloo=False)
    alive, dead = rank_outcomes(_dies_on_one, 2, gloo=False)
    assert alive.value == "alive" and dead.exit_code == -9


def test_late_ranks_are_named_and_killed() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        run_ranks(_sleeps, 2, timeout_s=2, gloo=False)
