"""The all-reduces that a start gives to the ranks of a replica: tried, timed and chosen."""

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from inline import worker_config
from ranks import Rank, join, run_ranks
from torch import Tensor

from lockstep.comm.all_reduce.choose import AllReduceTable
from lockstep.comm.all_reduce.table import Choice, parse_table
from lockstep.comm.errors import CommError
from lockstep.comm.messages import SumTimes
from lockstep.parallel.placement import Placement
from lockstep.worker.graphs.host import HostBackend
from lockstep.worker.layers import RMSNorm
from lockstep.worker.sums import choose, fused
from lockstep.worker.sums.choose import run_race
from lockstep.worker.sums.fused import Case, create_fused, trial
from lockstep.worker.sums.times import Race, row_counts_up_to

SIZE = 16
CPU = torch.device("cpu")


def new_norm() -> RMSNorm:
    norm = RMSNorm(SIZE, 1e-5, Placement(SimpleNamespace(size=1), CPU, torch.bfloat16))
    norm.weight.copy_(torch.linspace(0.5, 2, SIZE))
    return norm


@dataclass(frozen=True)
class Answers:
    """Stands for a fused all-reduce: answers each case in turn, perhaps wrongly."""

    wrong: str = ""
    looks: int = 0
    asked: list[int] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)
    memory: Any = field(
        default_factory=lambda: SimpleNamespace(world=3, max_rows=4, late=torch.zeros(1))
    )

    def __call__(self, x: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        if self.looks == 1:
            self.compiled.append(len(x))
            return x, residual
        self.asked.append(len(x))
        case = Case.draw(3, len(x), len(self.asked) - 1, norm.weight)
        assert x.equal(case.xs[1])
        summed = case.summed()
        if self.wrong == "sign of zero":
            summed = summed + 0.0
            residual = residual.clone().index_fill_(1, torch.tensor([7]), 0.0)
        if self.wrong == "one bit" and len(self.asked) == 6:
            summed.view(torch.int16)[0, 1] ^= 1
        normed, total = norm.add(summed, residual)
        return normed * (1.5 if self.wrong == "norm" else 1), total

    @property
    def gave_up(self) -> bool:
        return self.wrong == "late"


VERDICTS = {
    "": None,
    "late": "with 1 rows, words of a peer do not arrive",
    "one bit": "with 3 rows, sums differ from those in rank order",
    "sign of zero": "with 1 rows, sums differ from those in rank order",
    "norm": "with 1 rows, norms differ from those of the sums",
}


class Host:
    """The ranks of a group that answer as this one, or as ``others`` say."""

    rank, size = 1, 3

    def __init__(self, *others: Any) -> None:
        self.others = list(others)

    def all_gather_object(self, obj: Any, timeout_s: float | None = None) -> list[Any]:
        answers = [obj, self.others.pop(0) if self.others else obj]
        return [msgspec.to_builtins(answer) for answer in answers]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.mark.parametrize("wrong", VERDICTS)
def test_what_is_wrong_is_found_before_anything_relies_on_it(
    monkeypatch, device, wrong: str
) -> None:
    answers = Answers(wrong)
    monkeypatch.setattr(fused, "_make", lambda tp, norm: answers)
    found = create_fused(Host(), new_norm())
    assert found == (VERDICTS[wrong] or answers)
    if not wrong:
        assert answers.asked == [1] * 3 + [3] * 3 + [4] * 3
        assert answers.compiled == [1, 4], "one row, and all that fit"


def test_a_rank_that_cannot_make_it_or_gets_other_bits_decides_for_all(monkeypatch, device) -> None:
    monkeypatch.setattr(fused, "_make", lambda tp, norm: Answers())
    assert create_fused(Host("rank 2 says no"), new_norm()) == "rank 2 says no"
    assert create_fused(Host(None, "rank 2 cannot compile"), new_norm()).startswith("rank 2")
    assert create_fused(Host(None, None, "digest"), new_norm()) == "ranks get different bits"

    def no_memory(tp: object, norm: object) -> None:
        raise RuntimeError("driver says no")

    monkeypatch.setattr(fused, "_make", no_memory)
    assert create_fused(Host(), new_norm()) == "RuntimeError: driver says no"


def test_answers_of_ranks_can_be_compared() -> None:
    cases = [Case.draw(3, 2, seed, new_norm().weight) for seed in range(2)]
    digests = {trial(Answers(), new_norm(), 1, cases[:count])[1] for count in (1, 2, 2)}
    assert len(digests) == 2


def _algorithm(name: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, supports=lambda x: True)


FUSED = SimpleNamespace(name="fused", num_bytes=8, supports=lambda x: True)
TIMES = [
    SumTimes(1024, {"nccl": 9.0, "one_shot": 5.0, "fused": 3.0}),
    SumTimes(2048, {"nccl": 9.0, "one_shot": 10.0, "fused": 9.5}),
]


class Raced:
    """Takes ``TIMES`` for all that there is."""

    def __init__(self, topology: object, norm: object, fused: object, *_: object) -> None:
        self.names = ("nccl", "one_shot", "fused") if fused else ("nccl", "one_shot")

    def capture(self) -> None: ...

    def times(self) -> list[SumTimes]:
        return [
            SumTimes(row.num_bytes, {name: row.microseconds[name] for name in self.names})
            for row in TIMES
        ]

    def release(self) -> None: ...


class Broken(Raced):
    def capture(self) -> None:
        raise RuntimeError("no graphs")


def _choose(
    monkeypatch, text: str, *, created: object = FUSED, symmetric=True, lockstep=None, race=Raced
) -> tuple[str, list[SumTimes]]:
    """(table, times) of a start with ``--all-reduce text`` on two GPUs."""
    names = ("nccl", "one_shot") if symmetric else ("nccl",)
    sums = AllReduceTable([Choice("nccl", None)], {name: _algorithm(name) for name in names})
    spec = SimpleNamespace(device="cuda:0")
    topology = SimpleNamespace(
        tp=SimpleNamespace(size=2, table=sums), lockstep=lockstep or Host(), spec=spec
    )
    monkeypatch.setattr(choose, "_norm", lambda *args: new_norm())
    monkeypatch.setattr(choose, "create_fused", lambda tp, norm: created)
    monkeypatch.setattr(choose, "CudaBackend", lambda device: None)
    monkeypatch.setattr(choose, "Race", race)
    config = msgspec.structs.replace(worker_config(), all_reduce=text)
    times = choose.choose_sums(config, topology)
    return topology.tp.table.text, times


def test_auto_takes_the_fastest_by_time_and_a_table_is_taken_as_it_is(monkeypatch) -> None:
    assert _choose(monkeypatch, "auto") == ("fused:1024,one_shot:1024,nccl", TIMES)
    assert _choose(monkeypatch, "fused:64,nccl") == ("fused:64,nccl", [])
    assert _choose(monkeypatch, "nccl") == ("nccl", [])
    assert _choose(monkeypatch, "auto", symmetric=False) == ("nccl", [])


def test_what_does_not_work_is_done_without_unless_it_was_asked_for(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    table, _ = _choose(monkeypatch, "auto", created="words do not arrive")
    assert "stay two operations: words do not arrive" in caplog.text
    assert "as measured: one_shot:1024,nccl" in caplog.text and table == "one_shot:1024,nccl"
    replica = Host(None, "another replica says no", None, TIMES)
    assert _choose(monkeypatch, "auto", lockstep=replica)[0] == "one_shot:1024,nccl"
    assert _choose(monkeypatch, "auto", race=Broken) == ("nccl", [])
    assert "stay nccl, since they cannot be timed: RuntimeError: no graphs" in caplog.text
    with pytest.raises(CommError, match="'fused:64,nccl' cannot work here: words do not"):
        _choose(monkeypatch, "fused:64,nccl", created="words do not arrive")


def test_sizes_are_powers_of_two_up_to_a_step_and_to_8_mib() -> None:
    assert row_counts_up_to(5, 8192) == [1, 2, 4]
    assert row_counts_up_to(4096, 8192)[-1] == 1024
    assert row_counts_up_to(4, 16 << 20) == [1]


class OverGloo:
    """A fused all-reduce of the host, of at most two rows."""

    name, buffer, num_bytes = "fused", "push", 0

    def __init__(self, tp: Any) -> None:
        self._tp = tp

    def supports(self, x: Tensor) -> bool:
        return len(x) <= 2

    def __call__(self, x: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        return norm.add(self._tp.all_gather(x).float().sum(0).to(x), residual)


def _on_ranks(rank: Rank) -> tuple[list[bool], list[tuple[str, str, str]], list[SumTimes]]:
    topology, norm = join(rank), new_norm()
    tp, equal = topology.tp, []
    tp.table = tp.table.rechosen(parse_table("fused:1024,gloo"), OverGloo(tp))
    with topology.ledger.recorded() as entries:
        for rows in (1, 2, 3):
            case = Case.draw(2, rows, rows, norm.weight)
            found = tp.all_reduce_add_norm(case.xs[rank.rank].clone(), case.residual, norm)
            wanted = norm.add(case.summed(), case.residual)
            equal += [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]
    times = run_race(Race(topology, norm, OverGloo(tp), [1, 4], HostBackend()), topology)
    sums = [(entry.op, entry.algorithm, entry.buffer) for entry in entries]
    return equal, [entry for entry in sums if entry[0] != "all_gather"], times


def test_ranks_sum_and_norm_as_the_table_says_and_time_it() -> None:
    for equal, entries, times in run_ranks(_on_ranks, 2, gloo=False):
        assert equal == [True] * 6
        one = ("all_reduce_add_norm", "fused", "push")
        assert entries == [one, one, ("all_reduce", "gloo", "")]
        assert [row.num_bytes for row in times] == [32, 128]
        assert [sorted(row.microseconds) for row in times] == [["fused", "gloo"], ["gloo"]]
        assert all(took > 0 for row in times for took in row.microseconds.values())
