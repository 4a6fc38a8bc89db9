"""Memory of a worker on a GPU: filled to the promise, addressable to the top, nothing new later."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest
import torch
from compilations import compilations
from gpu_rig import BLOCKS_PER_LANE, MAX_LANES, GpuRig, gpu_config, gpu_requests
from inline import Served, make_scheduler, run_turns
from ranks import Rank, run_ranks

from lockstep.comm.messages import MemoryReport
from lockstep.worker import rank_memory
from lockstep.worker.config import WorkerConfig
from lockstep.worker.device_bytes import read_device
from lockstep.worker.graphs.mode import RunMode
from lockstep.worker.schedule.scheduler import Scheduler

pytestmark = pytest.mark.gpu


@pytest.fixture
def start_rig() -> Iterator[Callable[[WorkerConfig], GpuRig]]:
    """Starts workers and closes them, whatever becomes of the test: each fills the GPU."""
    with ExitStack() as rigs:

        def start(config: WorkerConfig) -> GpuRig:
            rig = GpuRig(config)
            rigs.callback(rig.close)
            return rig

        yield start


def used_fraction() -> float:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / total


def check_report(report: MemoryReport, utilization: float) -> None:
    """Parts add up to what the device says, and none of them is empty without a reason."""
    free, total = torch.cuda.mem_get_info()
    assert report.total == total and report.budget == int(total * utilization)
    assert sum(report.parts.values()) == pytest.approx(total - free, abs=64 << 20)
    assert report.parts["communication"] == 0 and report.estimate_error is None
    assert all(report.parts[name] > 0 for name in ("weights", "workspaces", "graphs", "kv_cache"))
    assert report.parts["driver"] > -(64 << 20)


def num_blocks_of_a_start(rank: Rank) -> int:
    rig = GpuRig(gpu_config(num_blocks=None, utilization=0.9))
    rig.close()
    return rig.ready.num_blocks


@pytest.mark.timeout(300)
def test_five_starts_in_a_row_have_the_same_number_of_blocks() -> None:
    counts = [run_ranks(num_blocks_of_a_start, 1, gloo=False)[0] for _ in range(5)]
    assert max(counts) - min(counts) <= 0.001 * max(counts), counts


def test_a_budget_that_is_spent_already_is_refused_with_the_sum() -> None:
    with pytest.raises(ValueError, match=r"got 0\.001: weights .* = .* MiB of .* are taken"):
        GpuRig(gpu_config(num_blocks=None, utilization=0.001))


def pooled_bytes(*sizes: int) -> int:
    config = gpu_config()
    graph = msgspec.structs.replace(config.graph, capture_sizes=sizes)
    rig = GpuRig(msgspec.structs.replace(config, graph=graph))
    found = read_device(torch.device("cuda:0")).pooled
    rig.close()
    return found


def test_many_sizes_hardly_cost_more_than_the_largest() -> None:
    one = pooled_bytes(MAX_LANES)
    assert 0 < pooled_bytes(*range(1, MAX_LANES + 1)) < 1.3 * one


def serve_full_load(rig: GpuRig, scheduler: Scheduler, **sampling: object) -> None:
    """Twice as many requests as lanes, so that lanes join, leave and move."""
    for add in gpu_requests(2 * MAX_LANES, max_tokens=40, **sampling):
        scheduler.add(add)
    served = Served()
    run_turns(rig.worker, scheduler, served)
    assert set(served.finish.values()) == {"length"}
    scheduler.check_conserved()


@pytest.mark.parametrize("utilization", [0.5, 0.9, 0.97])
def test_used_memory_is_what_was_promised_and_nothing_comes_first_later(
    utilization: float, start_rig: Callable[[WorkerConfig], GpuRig]
) -> None:
    rig = start_rig(gpu_config(num_blocks=None, utilization=utilization))
    scheduler = make_scheduler(rig.worker.config, rig.ready.num_blocks)
    assert used_fraction() == pytest.approx(utilization, abs=0.01)
    check_report(rig.ready.memory, utilization)
    before = torch.cuda.memory_stats()
    with compilations() as compiled:
        for sampling in (
            {"temperature": 0.0},
            {"temperature": 0.9, "top_p": 0.9, "top_k": 30, "presence_penalty": 0.2, "seed": 1},
            {"temperature": 0.9, "logprobs": 5, "seed": 2},
        ):
            serve_full_load(rig, scheduler, **sampling)
            assert used_fraction() == pytest.approx(utilization, abs=0.01)
    assert compiled == []
    after = torch.cuda.memory_stats()
    for counter in ("num_device_alloc", "num_alloc_retries"):
        assert after[counter] == before[counter], counter


def test_the_top_blocks_of_a_full_pool_work(
    start_rig: Callable[[WorkerConfig], GpuRig],
) -> None:
    rig = start_rig(gpu_config(num_blocks=None, utilization=0.9))
    made = []
    tops = [rig.ready.num_blocks - 1, MAX_LANES * BLOCKS_PER_LANE]
    for top in tops:
        blocks = [
            [top - lane * BLOCKS_PER_LANE - i for i in range(BLOCKS_PER_LANE)] for lane in range(4)
        ]
        made.append([rig.prefill(4, blocks).token_ids])
        made[-1] += [rig.decode(RunMode.FULL, 4)[0] for _ in range(12)]
        rig.keep(0)
    assert made[0] == made[1]
    byte_offset = tops[0] * rig.kv.layout.block_bytes
    assert byte_offset > 2**32, "the pool is too small to show anything"


def test_without_mapping_the_estimate_keeps_the_promise_from_below(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    start_rig: Callable[[WorkerConfig], GpuRig],
) -> None:
    monkeypatch.setattr(rank_memory, "unavailable_reason", lambda device: "told so by a test")
    rig = start_rig(gpu_config(num_blocks=None, utilization=0.5))
    assert "estimated, since it cannot be mapped: told so by a test" in caplog.text
    serve_full_load(rig, make_scheduler(rig.worker.config, rig.ready.num_blocks))
    assert 0.45 < used_fraction() < 0.51
    report = rig.ready.memory
    unused = report.budget - sum(report.parts.values())
    assert report.estimate_error == pytest.approx(unused, abs=rig.kv.layout.block_bytes + (4 << 20))


def test_closing_gives_the_memory_back() -> None:
    before = used_fraction()
    rig = GpuRig(gpu_config(num_blocks=None, utilization=0.5))
    rig.close()
    assert used_fraction() < before + 0.02
