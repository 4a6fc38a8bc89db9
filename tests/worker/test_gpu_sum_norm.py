"""The fused sum, residual add and norm over two GPUs, against sums in rank order bit for bit."""

import random
from dataclasses import replace

import msgspec
import pytest
import torch
from gpu_rig import gpu_config, gpu_requests
from lockstep_ranks import serve_on_ranks
from ranks import Rank, join, run_ranks
from torch import Tensor

from lockstep.comm.all_reduce.table import Choice
from lockstep.parallel.config import ParallelConfig
from lockstep.parallel.placement import Placement
from lockstep.parallel.topology import Topology
from lockstep.worker.layers import RMSNorm
from lockstep.worker.sums import fused as fused_module
from lockstep.worker.sums.choose import choose_sums
from lockstep.worker.sums.fused import Case, create_fused

pytestmark = [pytest.mark.multigpu, pytest.mark.timeout(400)]

# Two, and as many as there are.
_WORLDS = sorted({2, max(2, torch.cuda.device_count())})
_LIMIT = 4 << 20
_WORDS = {2: torch.int16, 4: torch.int32}


def _joined(rank: Rank) -> Topology:
    topology = join(rank, device="cuda", timeout_s=60.0)
    topology.connect()
    return topology


def _norm(topology: Topology, size: int, dtype: torch.dtype) -> RMSNorm:
    place = Placement(topology.tp, torch.device(topology.spec.device), dtype)
    norm = RMSNorm(size, 1e-5, place)
    norm.weight.copy_(torch.linspace(0.5, 2.0, size))
    return norm


def _fuse(topology: Topology, norm: RMSNorm) -> int:
    """Sums that the norm follows are fused from here on; returns the rows that can be."""
    fused = create_fused(topology.tp, norm)
    assert not isinstance(fused, str), fused
    table = topology.tp.table
    topology.tp.table = table.rechosen([Choice("fused", _LIMIT), *table.choices], fused)
    return fused.memory.max_rows


def _strange(world: int, rows: int, seed: int, weight: Tensor) -> Case:
    """Infinities of both signs and NaN in the first row, alone and where they meet."""
    case = Case.draw(world, rows, seed, weight)
    case.xs[0, 0, 1], case.xs[-1, 0, 2] = float("inf"), -float("inf")
    case.xs[0, 0, 3], case.xs[1, 0, 3] = float("inf"), -float("inf")
    case.xs[1, 0, 4], case.residual[0, 5] = float("nan"), float("nan")
    return case


def _numbers(x: Tensor) -> Tensor:
    """Any NaN is as good as another."""
    return x.masked_fill(x.isnan(), 12345.0)


def _bits(x: Tensor) -> Tensor:
    """As ``_numbers``, but signs of zero count, which not every library keeps."""
    return _raw(_numbers(x))


def _raw(x: Tensor) -> Tensor:
    return x.view(_WORDS[x.element_size()])


def _wrong_sizes(rank: Rank, size: int, dtype: torch.dtype, row_counts: list[int]) -> list[str]:
    topology = _joined(rank)
    tp, norm, wrong = topology.tp, _norm(topology, size, dtype), []
    max_rows = _fuse(topology, norm)
    for rows in row_counts:
        case = _strange(rank.size, rows, rows, norm.weight)
        fused = tp.table.select_fused(case.xs[0]) is not None
        assert fused == (rows <= max_rows and case.xs[0].nbytes <= _LIMIT)
        normed, total = tp.all_reduce_add_norm(case.xs[rank.rank].clone(), case.residual, norm)
        if not fused and rank.size > 2:
            continue  # only two summands have one rounded sum in any order
        wanted, wanted_total = norm.add(case.summed(), case.residual)
        seen = _bits if fused else _numbers
        if not torch.equal(seen(total), seen(wanted_total)):
            wrong.append(f"sum of {rows} rows")
        if not torch.allclose(normed, wanted, rtol=0.02, atol=1e-3, equal_nan=True):
            wrong.append(f"norm of {rows} rows")
        for found in (normed, total):
            if fused and not _equal_everywhere(topology, found):
                wrong.append(f"{rows} rows differ between ranks")
    return wrong


def _equal_everywhere(topology: Topology, found: Tensor) -> bool:
    everywhere = topology.tp.all_gather(_raw(found).view(torch.uint8))
    return all(torch.equal(everywhere[0], other) for other in everywhere[1:])


# Of the last two a program takes several.
_FEW = [1, 2, 7, 33, 128, 200, 256]


@pytest.mark.parametrize("world", _WORLDS)
@pytest.mark.parametrize(
    "size, dtype, row_counts",
    [
        (4096, torch.bfloat16, [*range(1, 257), 300, 512]),
        (1024, torch.bfloat16, _FEW),
        (5120, torch.bfloat16, _FEW),
        (8192, torch.bfloat16, _FEW),
        (1024, torch.float32, _FEW),
        (8192, torch.float32, _FEW),
        (2048, torch.float16, _FEW),
    ],
)
def test_every_size_is_the_sum_in_rank_order_on_all_ranks(size, dtype, row_counts, world) -> None:
    found = run_ranks(_wrong_sizes, world, size, dtype, row_counts, gloo=False, timeout_s=240)
    assert found == [[]] * world


class Captured:
    """One fused sum in a graph, over tensors that stay where they are."""

    def __init__(self, topology: Topology, norm: RMSNorm, rows: int) -> None:
        self._tp, self._norm = topology.tp, norm
        self.x, self.residual, self.total = norm.weight.new_zeros(3, rows, len(norm.weight))
        self._call()
        torch.cuda.synchronize()
        topology.retire()
        topology.tp.barrier()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._call()

    def _call(self) -> None:
        self.total.copy_(self._tp.all_reduce_add_norm(self.x, self.residual, self._norm)[1])

    def replay(self, x: Tensor, residual: Tensor) -> Tensor:
        self.x.copy_(x)
        self.residual.copy_(residual)
        self._graph.replay()
        return self.total


def _wrong_turns(rank: Rank, num_turns: int, late_every: int) -> int:
    """Numbers that are wrong over so many replays, eager sums of both kinds between them."""
    topology = _joined(rank)
    norm, tp = _norm(topology, 2048, torch.bfloat16), topology.tp
    counts, seeds = (1, 8, 64, _fuse(topology, norm)), range(6)
    graphs = {rows: Captured(topology, norm, rows) for rows in counts}
    cases = {(n, seed): _strange(rank.size, n, seed, norm.weight) for n in counts for seed in seeds}
    totals = {key: norm.add(case.summed(), case.residual)[1] for key, case in cases.items()}
    draw, wrong = random.Random(0), torch.zeros((), dtype=torch.int64, device=norm.weight.device)
    for turn in range(num_turns):
        key, other = ((draw.choice(counts), draw.choice(seeds)) for _ in range(2))
        if late_every and turn % late_every == rank.rank:
            torch.cuda._sleep(50_000_000)
        found = graphs[key[0]].replay(cases[key].xs[rank.rank], cases[key].residual)
        wrong += (_bits(found) != _bits(totals[key])).sum()
        case = cases[other]
        mine = case.xs[rank.rank].clone()
        if turn % 3 == 0:
            differs = _numbers(tp.all_reduce(mine)) != _numbers(case.summed())
            wrong += differs.sum() if rank.size == 2 else 0
        elif turn % 3 == 1:
            found = tp.all_reduce_add_norm(mine, case.residual, norm)[1]
            wrong += (_bits(found) != _bits(totals[other])).sum()
    return int(wrong)


@pytest.mark.parametrize("world", _WORLDS)
def test_ten_thousand_replays_among_eager_sums_of_both_kinds(world: int) -> None:
    found = run_ranks(_wrong_turns, world, 10_000, 0, gloo=False, timeout_s=300)
    assert found == [0] * world


@pytest.mark.parametrize("world", _WORLDS)
def test_a_rank_that_is_late_again_and_again_is_waited_for(world: int) -> None:
    assert run_ranks(_wrong_turns, world, 200, 9, gloo=False, timeout_s=240) == [0] * world


def _deaf(rank: Rank) -> tuple[object, str, str]:
    """As where words written to a peer do not get there: all go to this rank's own memory."""
    make = fused_module._make

    def made(tp, norm):
        fused = make(tp, norm)
        memory = fused.memory
        own = memory.addresses[memory.rank].expand(memory.world).clone()
        return replace(fused, memory=replace(memory, addresses=own))

    fused_module._make = made
    topology = _joined(rank)
    reason = create_fused(topology.tp, _norm(topology, 1024, torch.bfloat16))
    choose_sums(gpu_config(parallel=ParallelConfig(tp_size=2)), topology)
    before = topology.tp.table.text
    fused_module._make = make
    choose_sums(gpu_config(parallel=ParallelConfig(tp_size=2)), topology)
    return reason, before, topology.tp.table.text


def test_words_that_do_not_arrive_are_found_at_start_and_done_without() -> None:
    for reason, without, chosen in run_ranks(_deaf, 2, gloo=False, timeout_s=240):
        assert reason == "with 1 rows, words of a peer do not arrive"
        assert "fused" not in without and without.endswith("nccl")
        assert chosen.startswith("fused:") and chosen.endswith("nccl")


@pytest.mark.parametrize(
    "mode, compiled", [("NONE", False), ("PIECEWISE", False), ("FULL", False), ("PIECEWISE", True)]
)
def test_fused_sums_give_the_tokens_of_one_rank(mode: str, compiled: bool) -> None:
    adds = gpu_requests(6, max_tokens=16)
    options = {"graph_mode": mode, "capture_sizes": (1, 2, 4, 8, 24), "compile": compiled}
    alone = gpu_config(graph_mode="NONE")
    pair = gpu_config(
        parallel=ParallelConfig(tp_size=2), all_reduce=f"fused:{_LIMIT},nccl", **options
    )
    one, two = (
        run_ranks(
            serve_on_ranks, config.parallel.world_size, msgspec.msgpack.encode(config), adds,
            "cuda", gloo=False, timeout_s=300,
        )
        for config in (alone, pair)
    )  # fmt: skip
    assert [tokens for tokens, _ in two] == [one[0][0]] * 2
