"""All-reduces of all GPUs: bit-equal over ranks, eager and in graphs, in any order of both."""

import os
import time

import pytest
import torch
from ranks import Rank, join, num_gpus, run_ranks

from lockstep.comm.all_reduce import create
from lockstep.comm.all_reduce.symmetric import PeerFault
from lockstep.parallel.topology import Topology

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(300)]

_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_NUM_BYTES = (16, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20)
_CHOICES = ("nccl", "one_shot", "two_shot", "auto")
_WORLD = num_gpus()


def _joined(rank: Rank, choice: str) -> Topology:
    return join(rank, device="cuda", all_reduce=choice, timeout_s=60.0)


def _values(rank: int, num_elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of which every algorithm must give the same sum: two numbers have one rounded sum, and more
    numbers if they are whole and so small that no sum of theirs is rounded."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    if _WORLD == 2:
        return torch.randn(num_elements, generator=source).to(dtype).cuda()
    return torch.randint(-16, 17, (num_elements,), generator=source).to(dtype).cuda()


def _sum(num_elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    first, *others = (_values(rank, num_elements, dtype, seed) for rank in range(_WORLD))
    for other in others:
        first += other
    return first


def _wrong_eager(rank: Rank, choice: str) -> list[str]:
    comm = _joined(rank, choice).tp
    wrong = []
    for dtype in _DTYPES:
        for num_bytes in _NUM_BYTES:
            count = num_bytes // dtype.itemsize
            found = comm.all_reduce(_values(rank.rank, count, dtype).view(2, -1)).view(-1)
            if not torch.equal(found, _sum(count, dtype)):
                wrong.append(f"{choice} {dtype} {num_bytes}")
            source = torch.Generator().manual_seed(rank.rank)
            rounded = comm.all_reduce(torch.randn(count, generator=source).to(dtype).cuda())
            everywhere = comm.all_gather(torch.stack([found, rounded]))
            if not all(torch.equal(everywhere[0], other) for other in everywhere[1:]):
                wrong.append(f"{choice} {dtype} {num_bytes} differs between ranks")
    return wrong


@pytest.mark.parametrize("choice", _CHOICES)
def test_sum_is_exact_and_bit_equal_on_all_ranks(choice: str) -> None:
    assert run_ranks(_wrong_eager, _WORLD, choice, gloo=False, timeout_s=240) == [[]] * _WORLD


def _selected(rank: Rank) -> dict[str, str]:
    table = _joined(rank, "auto").tp.table

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
    found = run_ranks(_selected, _WORLD, gloo=False, timeout_s=240)
    expected = {
        "small": "one_shot", "middle": "two_shot", "large": "nccl", "half": "nccl",
        "ragged": "nccl", "shifted": "nccl",
    }  # fmt: skip
    assert found == [expected] * _WORLD


def _sums_without_peers(rank: Rank) -> tuple[str, str | None, bool]:
    """As on a host whose driver claims a peer access that gives wrong bytes."""
    create.find_bad_peer = lambda buffer, own, barrier: PeerFault((own + 1) % _WORLD, ended=True)
    comm = _joined(rank, "auto").tp
    found = comm.all_reduce(_values(rank.rank, 4096, torch.float32))
    right = torch.equal(found, _sum(4096, torch.float32))
    return comm.all_reduce_choice, os.environ.get("NCCL_P2P_DISABLE"), right


def test_peers_that_read_wrong_bytes_sum_by_nccl_without_peer_access() -> None:
    began = time.monotonic()
    found = run_ranks(_sums_without_peers, _WORLD, gloo=False, timeout_s=240)
    assert found == [("nccl", "1", True)] * _WORLD
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
            if not torch.equal(ys[count], 2 * _sum(count, torch.bfloat16, seed)):
                wrong.append(f"turn {turn}, {count} elements, seed {seed}")
    return wrong


@pytest.mark.parametrize("choice", _CHOICES)
def test_graphs_of_all_sizes_share_the_buffer(choice: str) -> None:
    assert run_ranks(_wrong_replays, _WORLD, choice, gloo=False, timeout_s=240) == [[]] * _WORLD


def _alternate(rank: Rank, choice: str) -> list[float]:
    """Eager all-reduce and graph replay in turns: each multiplies the value that all ranks hold."""
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
        x.mul_(1 / _WORLD**2)
        if turn % 1000 == 999:
            seen += [x.min().item(), x.max().item()]
    return seen


@pytest.mark.parametrize("choice", ["nccl", "auto"])
def test_ten_thousand_turns_of_eager_and_replay(choice: str) -> None:
    found = run_ranks(_alternate, _WORLD, choice, gloo=False, timeout_s=240)
    assert found == [[1.0] * 20] * _WORLD


def _contexts(rank: Rank) -> list[int]:
    """GPUs on which this process has a context once it has summed."""
    from cuda.bindings import driver

    comm = _joined(rank, "auto").tp
    for count in (1024, 1 << 22):
        comm.all_reduce(torch.ones(count, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    active = [driver.cuDevicePrimaryCtxGetState(index)[2] for index in range(_WORLD)]
    return [index for index, is_active in enumerate(active) if is_active]


def test_each_rank_opens_a_context_on_its_own_gpu_only() -> None:
    pytest.importorskip("cuda.bindings")
    found = run_ranks(_contexts, _WORLD, gloo=False, timeout_s=240)
    assert found == [[index] for index in range(_WORLD)]
