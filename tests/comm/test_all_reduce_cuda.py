"""All-reduces of two GPUs: bit-equal over ranks, eager and in graphs, in any order of both."""

import os
import time

import pytest
import torch
from ranks import Rank, join, run_ranks

from lockstep.comm.all_reduce import create
from lockstep.comm.all_reduce.symmetric import PeerFault
from lockstep.parallel.topology import Topology

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(300)]

_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_NUM_BYTES = (16, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20)
_CHOICES = ("nccl", "one_shot", "two_shot", "auto")


def _joined(rank: Rank, choice: str) -> Topology:
    return join(rank, device="cuda", all_reduce=choice, timeout_s=60.0)


def _values(rank: int, num_elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(num_elements, generator=source).to(dtype).cuda()


def _wrong_eager(rank: Rank, choice: str) -> list[str]:
    comm = _joined(rank, choice).tp
    wrong = []
    for dtype in _DTYPES:
        for num_bytes in _NUM_BYTES:
            count = num_bytes // dtype.itemsize
            # Two summands have one rounded sum, so every algorithm must give these very bits.
            expected = _values(0, count, dtype) + _values(1, count, dtype)
            found = comm.all_reduce(_values(rank.rank, count, dtype).view(2, -1)).view(-1)
            everywhere = comm.all_gather(found)
            if not torch.equal(found, expected) or not torch.equal(everywhere[0], everywhere[1]):
                wrong.append(f"{choice} {dtype} {num_bytes}")
    return wrong


@pytest.mark.parametrize("choice", _CHOICES)
def test_sum_is_exact_and_bit_equal_on_both_ranks(choice: str) -> None:
    assert run_ranks(_wrong_eager, 2, choice, gloo=False, timeout_s=240) == [[], []]


def _selected(rank: Rank) -> dict[str, str]:
    table = _joined(rank, "auto").tp._table

    def select(num_bytes: int, dtype: torch.dtype) -> str:
        x = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device="cuda")
        return table.select(x).name

    return {
        "small": select(8 << 10, torch.bfloat16),
        "middle": select(1 << 20, torch.float32),
        "large": select(8 << 20, torch.bfloat16),
        "half": select(8 << 10, torch.float16),
        "ragged": select(10, torch.bfloat16),
        "shifted": table.select(torch.empty(4097, device="cuda")[1:]).name,
    }


def test_auto_uses_symmetric_memory_inside_and_nccl_for_the_rest() -> None:
    found = run_ranks(_selected, 2, gloo=False, timeout_s=240)
    expected = {
        "small": "one_shot", "middle": "two_shot", "large": "nccl", "half": "nccl",
        "ragged": "nccl", "shifted": "nccl",
    }  # fmt: skip
    assert found == [expected] * 2


def _sums_without_peers(rank: Rank) -> tuple[str, str | None, bool]:
    """As on a host whose driver claims a peer access that gives wrong bytes."""
    create.find_bad_peer = lambda buffer, own, barrier: PeerFault(1 - own, ended=True)
    comm = _joined(rank, "auto").tp
    found = comm.all_reduce(_values(rank.rank, 4096, torch.float32))
    expected = _values(0, 4096, torch.float32) + _values(1, 4096, torch.float32)
    return comm.all_reduce_choice, os.environ.get("NCCL_P2P_DISABLE"), torch.equal(found, expected)


def test_peers_that_read_wrong_bytes_sum_by_nccl_without_peer_access() -> None:
    began = time.monotonic()
    assert run_ranks(_sums_without_peers, 2, gloo=False, timeout_s=240) == [("nccl", "1", True)] * 2
    assert time.monotonic() - began < 60


def _wrong_replays(rank: Rank, choice: str) -> list[str]:
    """Inputs X, Y, X through graphs of three sizes that share one buffer."""
    comm = _joined(rank, choice).tp
    counts = [2048, 32768, 131072]
    xs = {count: torch.zeros(count, dtype=torch.bfloat16, device="cuda") for count in counts}
    ys = {count: torch.zeros_like(x) for count, x in xs.items()}
    graphs = {}
    for count in reversed(counts):
        comm.all_reduce(xs[count].clone())
        torch.cuda.synchronize()
        comm.retire()
        comm.barrier()
        graphs[count] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[count], capture_error_mode="thread_local"):
            ys[count].copy_(comm.all_reduce(xs[count] * 2))
    wrong = []
    for turn, count in enumerate([*counts, *reversed(counts), *counts]):
        for seed in (1, 2, 1):
            xs[count].copy_(_values(rank.rank, count, torch.bfloat16, seed))
            graphs[count].replay()
            expected = 2 * (
                _values(0, count, torch.bfloat16, seed) + _values(1, count, torch.bfloat16, seed)
            )
            if not torch.equal(ys[count], expected):
                wrong.append(f"turn {turn}, {count} elements, seed {seed}")
    return wrong


@pytest.mark.parametrize("choice", _CHOICES)
def test_graphs_of_all_sizes_share_the_buffer(choice: str) -> None:
    assert run_ranks(_wrong_replays, 2, choice, gloo=False, timeout_s=240) == [[], []]


def _alternate(rank: Rank, choice: str) -> list[float]:
    """Eager all-reduce and graph replay in turns: each doubles the value that both ranks hold."""
    comm = _joined(rank, choice).tp
    x = torch.ones(4096, device="cuda")
    comm.all_reduce(x.clone())
    torch.cuda.synchronize()
    comm.retire()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x.copy_(comm.all_reduce(x.clone()))
    seen = []
    for turn in range(10_000):
        graph.replay()
        x.copy_(comm.all_reduce(x.clone()))
        x.mul_(0.25)
        if turn % 1000 == 999:
            seen += [x.min().item(), x.max().item()]
    return seen


@pytest.mark.parametrize("choice", ["nccl", "auto"])
def test_ten_thousand_turns_of_eager_and_replay(choice: str) -> None:
    assert run_ranks(_alternate, 2, choice, gloo=False, timeout_s=240) == [[1.0] * 20] * 2


def _contexts(rank: Rank) -> list[int]:
    """GPUs on which this process has a context once it has summed."""
    from cuda.bindings import driver

    comm = _joined(rank, "auto").tp
    for count in (1024, 1 << 22):
        comm.all_reduce(torch.ones(count, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    active = [driver.cuDevicePrimaryCtxGetState(index)[2] for index in range(2)]
    return [index for index, is_active in enumerate(active) if is_active]


def test_each_rank_opens_a_context_on_its_own_gpu_only() -> None:
    pytest.importorskip("cuda.bindings")
    assert run_ranks(_contexts, 2, gloo=False, timeout_s=240) == [[0], [1]]
