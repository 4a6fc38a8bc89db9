"""Which all-reduce serves a tensor, and when symmetric memory is not even tried."""

from types import SimpleNamespace

import pytest
import torch

from lockstep.comm.all_reduce import create
from lockstep.comm.all_reduce.choose import AllReduceTable, Choice, parse_table
from lockstep.comm.all_reduce.create import AUTO_TABLE, create_all_reduce
from lockstep.comm.collectives import Communicator
from lockstep.comm.errors import CommError


def test_table_reads_and_writes_as_text() -> None:
    assert parse_table("nccl") == (Choice("nccl", None),)
    assert parse_table("one_shot:8, nccl") == (Choice("one_shot", 8), Choice("nccl", None))
    table = AllReduceTable(parse_table(AUTO_TABLE), _algorithms("one_shot", "two_shot", "nccl"))
    assert table.text == AUTO_TABLE


@pytest.mark.parametrize(
    "text", ["", "one_shot:8", "a:9,b:8,c", "a:8,b:8,c", "a,b", "a:x,b", "a b", "a:,b", "a:-1,b"]
)
def test_bad_table_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="all_reduce must be") as caught:
        parse_table(text)
    assert repr(text) in str(caught.value)


def _algorithms(*names: str, dtype: torch.dtype = torch.float32) -> dict[str, SimpleNamespace]:
    return {name: SimpleNamespace(name=name, supports=lambda x: x.dtype is dtype) for name in names}


@pytest.mark.parametrize(
    "num_floats, expected", [(1, "a"), (2, "a"), (3, "b"), (4, "b"), (5, "c"), (1000, "c")]
)
def test_least_limit_that_holds_the_tensor_serves_it(num_floats: int, expected: str) -> None:
    table = AllReduceTable(parse_table("a:8,b:16,c"), _algorithms("a", "b", "c"))
    assert table.select(torch.zeros(num_floats)).name == expected
    assert table.select(torch.zeros(num_floats, dtype=torch.float16)).name == "c"


class _Group:
    """A CUDA group of two ranks as far as deciding needs one."""

    ranks, rank, size = (4, 5), 0, 2
    device = torch.device("cuda:0")

    def __init__(self, *, same_host: bool = True) -> None:
        self.peers = SimpleNamespace(same_host=lambda ranks: same_host)


class _Host:
    """Answers of rank 1 beside those of this rank."""

    def __init__(self, index: int = 1, objects: str | None = None) -> None:
        self._answers = [index]
        self._other = objects

    def all_gather_object(self, obj, timeout_s=None):
        return [obj, self._answers.pop() if self._answers else self._other]

    def barrier(self, timeout_s=None) -> None:
        pass


_BUFFER = SimpleNamespace(size=2)


@pytest.fixture
def machine(monkeypatch):
    """A machine on which everything works; tests break one thing."""
    facts = {"peer": True, "create": lambda group, num_bytes: _BUFFER, "reads": True}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: facts["peer"])
    buffers = SimpleNamespace(create=lambda group, size: facts["create"](group, size))
    monkeypatch.setattr(create, "SymmetricBuffer", buffers)
    monkeypatch.setattr(create, "peer_reads_work", lambda *args: facts["reads"])
    return facts


def _no_rendezvous(group, num_bytes):
    raise RuntimeError("driver says no")


_OBSTACLES = {
    "several hosts": (dict(), dict(same_host=False), dict()),
    "devices overlap": (dict(), dict(), dict(index=0)),
    "no peer access to GPU 1": (dict(peer=False), dict(), dict()),
    "driver says no": (dict(create=_no_rendezvous), dict(), dict()),
    "rank 4 reads wrong bytes": (dict(reads=False), dict(), dict()),
    "what rank 5 found": (dict(), dict(), dict(objects="what rank 5 found")),
}


def test_symmetric_memory_serves_where_every_peer_was_read(machine) -> None:
    assert create_all_reduce(_Group(), "auto", _Host()).text == AUTO_TABLE
    table = create_all_reduce(_Group(), "two_shot", _Host())
    assert table.text == "two_shot:4194304,nccl"


@pytest.mark.parametrize("reason", _OBSTACLES)
def test_obstacle_means_nccl_or_an_error_if_it_was_asked_for(machine, reason: str) -> None:
    facts, group, host = _OBSTACLES[reason]
    machine |= facts
    assert create_all_reduce(_Group(**group), "auto", _Host(**host)).text == "nccl"
    with pytest.raises(CommError, match=reason):
        create_all_reduce(_Group(**group), "one_shot", _Host(**host))


def test_nccl_alone_tries_no_symmetric_memory(machine) -> None:
    machine["create"] = _no_rendezvous
    assert create_all_reduce(_Group(), "nccl", _Host()).text == "nccl"


def test_unknown_names_are_refused_with_what_there_is() -> None:
    cpu = _Group()
    cpu.device = torch.device("cpu")
    with pytest.raises(ValueError, match=r"one of \['gloo'\] here, got 'nccl'"):
        create_all_reduce(cpu, "nccl", _Host())
    with pytest.raises(ValueError, match=r"'nccl', 'one_shot', 'two_shot'\] here, got 'ring'"):
        create_all_reduce(_Group(), "ring", _Host())
    assert create_all_reduce(cpu, "auto", _Host()).text == "gloo"


def test_group_of_one_has_no_choice() -> None:
    assert Communicator.single().all_reduce_choice == "none"
