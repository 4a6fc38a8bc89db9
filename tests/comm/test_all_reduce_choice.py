"""Which all-reduce serves a tensor, and when symmetric memory is not even tried."""

import os
from types import SimpleNamespace

import pytest
import torch

from lockstep.comm.all_reduce import create, symmetric
from lockstep.comm.all_reduce.choose import AllReduceTable
from lockstep.comm.all_reduce.create import AUTO_TABLE, create_all_reduce
from lockstep.comm.all_reduce.symmetric import PeerFault, SymmetricBuffer, find_bad_peer
from lockstep.comm.all_reduce.table import Choice, parse_table
from lockstep.comm.collectives import Communicator
from lockstep.comm.errors import CommError


def test_table_reads_and_writes_as_text() -> None:
    assert parse_table("nccl") == (Choice("nccl", None),)
    assert parse_table("one_shot:8, nccl") == (Choice("one_shot", 8), Choice("nccl", None))
    table = AllReduceTable(parse_table(AUTO_TABLE), _algorithms("one_shot", "two_shot", "nccl"))
    assert table.text == AUTO_TABLE


@pytest.mark.parametrize(
    "text",
    [
        "", "one_shot:8", "a:9,b:8,c", "a:8,b:8,c", "a,b", "a:x,b", "a b", "a:,b", "a:-1,b",
        "fused", "fused:8", "a:8,fused:9,b", "fused:8,fused:9,b",
    ],
)  # fmt: skip
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


@pytest.mark.parametrize("limit, rows", [(0, 0), (16, 2), (100, 5)])
def test_fused_serves_sums_with_a_norm_behind_them_up_to_its_own_limit(limit, rows) -> None:
    fused = SimpleNamespace(name="fused", num_bytes=1000, supports=lambda x: len(x) < 6)
    sums = AllReduceTable(parse_table("a:8,b"), _algorithms("a", "b"), 24)
    table = sums.rechosen([Choice("fused", limit), *sums.choices], fused)
    assert table.text == f"fused:{limit},a:8,b" and table.buffer_bytes == 1024
    taken = [table.select_fused(torch.zeros(n, 2)) is fused for n in range(1, 9)]
    assert taken == [n <= rows for n in range(1, 9)]
    assert (
        table.select(torch.zeros(1, 2)).name == "a" and table.select(torch.zeros(2, 2)).name == "b"
    )
    assert sums.select_fused(torch.zeros(1, 2)) is None


class _Group:
    """A CUDA group of two ranks as far as deciding needs one."""

    ranks, rank, size = (4, 5), 0, 2
    device = torch.device("cuda:0")

    def __init__(self, *, same_host: bool = True) -> None:
        self.peers = SimpleNamespace(same_host=lambda ranks: same_host)


class _Host:
    """What rank 5 answers beside rank 4, gather by gather: its device, then what it found."""

    def __init__(self, index: int = 1, *found: str | None) -> None:
        self._answers = [index, *found]

    def all_gather_object(self, obj, timeout_s=None):
        return [obj, self._answers.pop(0) if self._answers else None]

    def barrier(self, timeout_s=None) -> None:
        pass


_BUFFER = SimpleNamespace(size=2, data=torch.zeros(24, dtype=torch.uint8))


@pytest.fixture
def machine(monkeypatch):
    """A machine on which everything works; tests break one thing."""
    facts = {"peer": True, "create": lambda group, num_bytes: _BUFFER, "fault": None}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: facts["peer"])
    buffers = SimpleNamespace(create=lambda group, size: facts["create"](group, size))
    monkeypatch.setattr(create, "SymmetricBuffer", buffers)
    monkeypatch.setattr(create, "find_bad_peer", lambda *args: facts["fault"])
    monkeypatch.setenv("NCCL_P2P_DISABLE", "unset")
    return facts


def _no_rendezvous(group, num_bytes):
    raise RuntimeError("driver says no")


_OBSTACLES = {
    "several hosts": (dict(), dict(same_host=False), []),
    "devices overlap": (dict(), dict(), [0]),
    "no peer access to GPU 1": (dict(peer=False), dict(), []),
    "driver says no": (dict(create=_no_rendezvous), dict(), []),
    "rank 5 has no peer access": (dict(), dict(), [1, "rank 5 has no peer access"]),
    "what rank 4 reads from rank 5 is wrong": (dict(fault=PeerFault(1, True)), dict(), []),
    "what rank 5 reads is wrong": (
        dict(),
        dict(),
        [1, None, None, None, "what rank 5 reads is wrong"],
    ),
}


def test_symmetric_memory_serves_where_every_peer_was_read(machine) -> None:
    assert create_all_reduce(_Group(), "auto", _Host()).text == AUTO_TABLE
    table = create_all_reduce(_Group(), "two_shot", _Host())
    assert table.text == "two_shot:4194304,nccl" and table.buffer_bytes == 24
    for_kernels = create_all_reduce(_Group(), "fused:64,nccl", _Host())
    assert for_kernels.text == "nccl" and "one_shot" in for_kernels.algorithms


@pytest.mark.parametrize("reason", _OBSTACLES)
def test_obstacle_means_nccl_or_an_error_if_it_was_asked_for(machine, reason: str) -> None:
    facts, group, host = _OBSTACLES[reason]
    machine |= facts
    assert create_all_reduce(_Group(**group), "auto", _Host(*host)).text == "nccl"
    kept = "1" if reason.endswith("is wrong") else "unset"
    assert os.environ["NCCL_P2P_DISABLE"] == kept
    with pytest.raises(CommError, match=reason):
        create_all_reduce(_Group(**group), "one_shot", _Host(*host))


@pytest.mark.parametrize("found", ["here", "by rank 5"])
def test_a_copy_from_a_peer_that_does_not_end_is_an_error_whatever_was_asked_for(
    machine, found: str
) -> None:
    machine["fault"] = PeerFault(1, False) if found == "here" else None
    pair = "what rank 4 reads from rank 5" if found == "here" else "what rank 5 reads from rank 4"
    for choice in ("auto", "two_shot"):
        host = _Host(1, None, None, None if found == "here" else f"{pair} does not arrive")
        with pytest.raises(CommError, match=f"peer access: {pair} does not arrive; NCCL_P2P_DIS"):
            create_all_reduce(_Group(), choice, host)


class _Event:
    """Of a copy that is done at once, or never."""

    never_done: list[bool] = []

    def record(self) -> None:
        self._done = not self.never_done.pop(0)

    def query(self) -> bool:
        return self._done


@pytest.mark.parametrize(
    ("last_bytes", "never_done", "found"),
    [
        ([1, 2, 3], [False] * 3, None),
        ([1, 9, 3], [False] * 3, PeerFault(1, ended=True)),
        ([1, 2, 0], [False] * 3, PeerFault(2, ended=True)),
        ([1, 2, 3], [False, True, False], PeerFault(1, ended=False)),
    ],
)
def test_every_peer_is_read_before_it_is_trusted(monkeypatch, last_bytes, never_done, found):
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(symmetric, "_PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(_Event, "never_done", list(never_done))
    joined = []

    def get_buffer(peer, shape, dtype, offset):
        assert joined == [0], "peers have filled their buffers"
        pattern = torch.full(shape, peer + 1, dtype=dtype)
        pattern[-1] = last_bytes[peer]
        return pattern

    data = torch.zeros(8192, dtype=torch.uint8)
    buffer = SymmetricBuffer(data, SimpleNamespace(get_buffer=get_buffer), "group", 3)
    assert find_bad_peer(buffer, 1, lambda: joined.append(0)) == found
    assert joined == [0, 0] and data[:4096].eq(2).all()


def test_nccl_alone_tries_no_symmetric_memory(machine) -> None:
    machine["create"] = _no_rendezvous
    assert create_all_reduce(_Group(), "nccl", _Host()).text == "nccl"


def test_unknown_names_are_refused_with_what_there_is() -> None:
    cpu = _Group()
    cpu.device = torch.device("cpu")
    with pytest.raises(ValueError, match="of gloo on cpu, got 'nccl'"):
        create_all_reduce(cpu, "nccl", _Host())
    with pytest.raises(ValueError, match="of nccl, one_shot, two_shot, fused on cuda, got 'ring'"):
        create_all_reduce(_Group(), "ring", _Host())
    assert create_all_reduce(cpu, "auto", _Host()).text == "gloo"


def test_group_of_one_has_no_choice() -> None:
    assert Communicator.single().all_reduce_choice == "none"
