"""The lines that a user sees after a start."""

import re
from pathlib import Path

import msgspec
import pytest
from inline_engine import start_inline_engine
from launched import answers, generate_arguments, run_here

from lockstep.comm.messages import GraphCost, MemoryReport, SumTimes, WorkerReady
from lockstep.launcher.engine import EngineSummary
from lockstep.launcher.start_report import late_report, num_graphs, start_report
from lockstep.worker.schedule.histogram import empty_histogram
from lockstep.worker.schedule.stats import ReplicaStats, SchedulerStats

MIB, GIB = 1 << 20, 1 << 30
PARTS = {
    "weights": 2 * GIB, "workspaces": GIB // 2, "graphs": GIB // 4, "communication": 0,
    "kv_cache": 100 * GIB, "before_start": GIB // 2, "driver": 0,
}  # fmt: skip
COSTS = [GraphCost(8, 1, 1.25, 200 * MIB, 4), GraphCost(4, 0, 0.5, 56 * MIB, 2)]
READY = WorkerReady(
    0, 1, "host", "cuda:0", 700, "FULL", 6, {"load": 9.0, "capture": 2.0},
    MemoryReport(parts=PARTS, total=140 * GIB, budget=126 * GIB), COSTS,
)  # fmt: skip


def lines(*ready: WorkerReady) -> list[str]:
    return start_report(EngineSummary(launcher="test", ready=list(ready)))


def changed(ready: WorkerReady, **fields: object) -> WorkerReady:
    return msgspec.structs.replace(ready, **fields)


def test_capture_by_size_and_memory_by_rank() -> None:
    slower = changed(READY, global_rank=1, stage_seconds={"capture": 3.5})
    assert lines(READY, slower) == [
        "graph capturing finished in 3.5 s, took 0.25 GiB: 6 graphs of 2 sizes",
        "graphs by size (s and MiB): 8: 1.250 200.0, mixed 4: 0.500 56.0",
        *(
            f"rank {rank} memory in GiB: weights 2.00, workspaces 0.50, graphs 0.25, "
            "communication 0.00, KV cache 100.00, before the start (CUDA context, other "
            "processes) 0.50, driver 0.00; 700 KV blocks; in use 103.25 of 140.00, budget 126.00"
            for rank in (0, 1)
        ),
    ]


def test_what_all_reduces_took_stands_beside_the_choice() -> None:
    times = [SumTimes(512, {"nccl": 20.04, "fused": 4.0}), SumTimes(8192, {"nccl": 21.0})]
    ready = changed(READY, all_reduce="fused:512,nccl", sum_times=times)
    assert lines(ready)[2] == (
        "all-reduce fused:512,nccl; with a norm behind it, us by KiB: 0.5: nccl 20.0 fused 4.0, "
        "8: nccl 21.0"
    )


def test_an_estimate_tells_by_how_much_it_was_wrong() -> None:
    report = msgspec.structs.replace(READY.memory, estimate_error=-3 * MIB)
    assert lines(changed(READY, memory=report))[-1] == (
        "rank 0 memory beside the KV cache was estimated: -3.0 MiB against what was then used"
    )


def test_without_graphs_or_a_device_that_counts() -> None:
    cpu = MemoryReport(parts={"weights": GIB, "kv_cache": GIB})
    memory = "rank 0 memory in GiB: weights 1.00, KV cache 1.00; 700 KV blocks"
    assert lines(changed(READY, memory=cpu, graph_costs=[])) == [memory]
    uncounted = [msgspec.structs.replace(cost, num_bytes=0) for cost in COSTS]
    assert lines(changed(READY, memory=cpu, graph_costs=uncounted)) == [
        "graph capturing finished in 2.0 s: 6 graphs of 2 sizes",
        "graphs by size (s): 8: 1.250, mixed 4: 0.500",
        memory,
    ]


def test_what_comes_later_is_announced_and_then_told_with_its_cost() -> None:
    memory = msgspec.structs.replace(READY.memory, graph_reserve=30 * MIB)
    ready = changed(READY, memory=memory, num_late_graphs=3)
    kept = "(30.0 MiB left free for all of them)"
    assert lines(ready)[2] == f"3 more sizes are captured while serving {kept}"
    summary = EngineSummary(launcher="test", ready=[ready] * 4)
    none = empty_histogram(())
    replicas = [ReplicaStats(*[0] * 9, none, costs) for costs in (COSTS, COSTS[1:])]
    counts = SchedulerStats(replicas, {}, 0, 0, {}, 0, 0, num_late_graphs=3)
    assert late_report(summary, counts) == [
        f"replica 0 captured 2 of 3 sizes while serving, in 1.75 s, which took 256.0 MiB {kept}",
        f"replica 1 captured 1 of 3 sizes while serving, in 0.50 s, which took 56.0 MiB {kept}",
    ]
    assert num_graphs(summary, counts) == "8 to 12"
    on_cpu = changed(ready, memory=MemoryReport(parts={}))
    assert late_report(EngineSummary(launcher="test", ready=[on_cpu] * 2), counts)[1] == (
        "replica 1 captured 1 of 3 sizes while serving, in 0.50 s"
    )
    assert late_report(summary, SchedulerStats(replicas, {}, 0, 0, {}, 0, 0)) == []


def test_generate_with_lazy_capture_gives_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = generate_arguments(tmp_path, max_tokens=60, tp=1)
    run_here(arguments, start_inline_engine)
    eager = answers(tmp_path)
    assert "while serving" not in capsys.readouterr().err
    run_here([*arguments, "--capture", "lazy"], start_inline_engine)
    assert answers(tmp_path) == eager and len(eager[0]) == 60
    told = capsys.readouterr().err
    # The next three of the manifest are in segments, of which two layers make three.
    assert f", {_graphs_at_start(told) + 3 * 3} graphs captured on each\n" in told
    assert "lockstep: 8 more sizes are captured while serving\n" in told
    assert "lockstep: replica 0 captured 3 of 8 sizes while serving, in " in told


def _graphs_at_start(told: str) -> int:
    found = re.search(r": (\d+) graphs of \d+ sizes\n", told)
    assert found is not None
    return int(found[1])
