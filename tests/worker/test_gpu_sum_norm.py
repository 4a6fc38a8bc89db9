"""The fused sum, residual add and norm over two GPUs, against sums in rank order bit for bit."""

import random
from collections.abc import Callable
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

_LIMIT = 2 << 20
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


def _bits(x: Tensor) -> Tensor:
    """Any NaN is as good as another; signs of zero count."""
    return x.masked_fill(x.isnan(), 12345.0).view(_WORDS[x.element_size()])


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
        wanted, wanted_total = norm.add(case.summed(), case.residual)
        if not torch.equal(_bits(total), _bits(wanted_total)):
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


_FEW = [1, 2, 7, 33, 128]


@pytest.mark.parametrize(
    "size, dtype, row_counts",
    [
        (4096, torch.bfloat16, list(range(1, 257))),
        (1024, torch.bfloat16, _FEW),
        (5120, torch.bfloat16, _FEW),
        (8192, torch.bfloat16, _FEW),
        (1024, torch.float32, _FEW),
        (8192, torch.float32, _FEW),
        (2048, torch.float16, _FEW),
    ],
)
def test_every_size_is_the_sum_in_rank_order_on_all_ranks(size, dtype, row_counts) -> None:
    assert run_ranks(
        _wrong_sizes, 2, size, dtype, row_counts, gloo=False, timeout_s=240
    ) == [[], []]  # fmt: skip


def _captured(topology: Topology, call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    topology.retire()
    topology.tp.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph


def _wrong_turns(rank: Rank, num_turns: int, late_every: int) -> int:
    """Numbers that are wrong over so many replays, eager sums of both kinds between them."""
    topology = _joined(rank)
    norm, tp = _norm(topology, 2048, torch.bfloat16), topology.tp
    _fuse(topology, norm)
    cases, statics, graphs = {}, {}, {}
    for rows in (1, 8, 64):
        cases[rows] = [_strange(2, rows, seed, norm.weight) for seed in range(6)]
        statics[rows] = tuple(torch.zeros_like(cases[rows][0].residual) for _ in range(4))
    for rows, (x, residual, normed, total) in statics.items():

        def call(x=x, residual=residual, normed=normed, total=total) -> None:
            found = tp.all_reduce_add_norm(x, residual, norm)
            normed.copy_(found[0])
            total.copy_(found[1])

        graphs[rows] = _captured(topology, call)
    wanted = {
        rows: [_bits(norm.add(case.summed(), case.residual)[1]) for case in drawn]
        for rows, drawn in cases.items()
    }
    draw, wrong = random.Random(0), torch.zeros((), dtype=torch.int64, device=norm.weight.device)
    for turn in range(num_turns):
        rows, seed, other = draw.choice([1, 8, 64]), draw.randrange(6), draw.choice([1, 8, 64])
        x, residual, _, total = statics[rows]
        x.copy_(cases[rows][seed].xs[rank.rank])
        residual.copy_(cases[rows][seed].residual)
        if late_every and turn % late_every == rank.rank:
            torch.cuda._sleep(50_000_000)
        graphs[rows].replay()
        wrong += (_bits(total) != wanted[rows][seed]).sum()
        case = cases[other][seed]
        mine = case.xs[rank.rank].clone()
        if turn % 3 == 0:
            wrong += (_bits(tp.all_reduce(mine)) != _bits(case.summed())).sum()
        elif turn % 3 == 1:
            found = tp.all_reduce_add_norm(mine, case.residual, norm)[1]
            wrong += (_bits(found) != wanted[other][seed]).sum()
    return int(wrong)


def test_ten_thousand_replays_among_eager_sums_of_both_kinds() -> None:
    assert run_ranks(_wrong_turns, 2, 10_000, 0, gloo=False, timeout_s=300) == [0, 0]


def test_a_rank_that_is_late_again_and_again_is_waited_for() -> None:
    assert run_ranks(_wrong_turns, 2, 200, 5, gloo=False, timeout_s=240) == [0, 0]


def _deaf(rank: Rank) -> tuple[object, str, str]:
    """As where words written to a peer do not get there: all go to this rank's own memory."""
    make = fused_module._make

    def made(tp, norm, max_rows):
        fused = make(tp, norm, max_rows)
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
