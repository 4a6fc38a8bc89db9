"""The lines that a user sees after a start."""

import msgspec

from lockstep.comm.messages import GraphCost, MemoryReport, WorkerReady
from lockstep.launcher.engine import EngineSummary
from lockstep.launcher.start_report import start_report

MIB, GIB = 1 << 20, 1 << 30
PARTS = {
    "weights": 2 * GIB, "workspaces": GIB // 2, "graphs": GIB // 4, "communication": 0,
    "kv_cache": 100 * GIB, "before_start": GIB // 2, "driver": 0,
}  # fmt: skip
COSTS = [GraphCost(8, 1, 1.25, 200 * MIB), GraphCost(4, 0, 0.5, 56 * MIB)]
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
