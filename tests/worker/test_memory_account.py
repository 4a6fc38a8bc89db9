"""Whose bytes are whose, on a device that a test plays; and what a real start on a CPU tells."""

import msgspec
import pytest
import torch
from inline import SPEC, alone_topology, dummy_model, worker_config
from rig import MAX_LANES

from lockstep.comm.messages import GraphCost
from lockstep.worker import rank_memory
from lockstep.worker.config import WorkerConfig
from lockstep.worker.device_bytes import DeviceBytes, read_device, storage_bytes
from lockstep.worker.graphs.dispatch import create_dispatcher
from lockstep.worker.graphs.manifest import build_manifest
from lockstep.worker.loop import Worker
from lockstep.worker.memory_account import MemoryAccount
from lockstep.worker.rank_memory import RankMemory
from lockstep.worker.stages import Stages

MIB = 1 << 20


class Device:
    """Bytes by who took them; ``read`` tells only what a real device and torch would tell."""

    def __init__(self, **taken: int) -> None:
        self.taken = {"context": 500, "strangers": 40} | taken

    def read(self) -> DeviceBytes:
        torchs = {"weights", "workspaces", "pool"}
        reserved = sum(size for name, size in self.taken.items() if name in torchs)
        pooled = self.taken.get("pool", 0)
        return DeviceBytes(10_000, sum(self.taken.values()), reserved, pooled)


def account_of(device: Device) -> MemoryAccount:
    """After a start in which every holder took its bytes at its time."""
    account = MemoryAccount(device.read, device.taken["symmetric"])
    device.taken["weights"] = 1000
    with account.communicating():
        device.taken["nccl"] = 70
        device.taken["workspaces"] = 8
    device.taken |= {"workspaces": 300, "modules": 90, "pool": 60, "graph nodes": 5, "kv": 4000}
    return account


def test_parts_are_what_their_holders_took_and_add_up_to_what_is_used() -> None:
    device = Device(symmetric=16)
    account = account_of(device)
    parts = account.parts(weights=1000, graphs=65, kv_cache=4000, kv_in_torch=0)
    assert parts == {
        "weights": 1000, "workspaces": 300, "graphs": 65, "communication": 16 + 70,
        "kv_cache": 4000, "before_start": 540, "driver": 90,
    }  # fmt: skip
    device.taken["strangers"] += 25
    moved = account.parts(weights=1000, graphs=65, kv_cache=4000, kv_in_torch=0)
    assert moved == parts | {"driver": 115}
    assert sum(moved.values()) == device.read().used


def test_a_cache_of_torch_is_not_counted_twice() -> None:
    device = Device(symmetric=16)
    account = account_of(device)
    device.taken["workspaces"] += device.taken.pop("kv")
    parts = account.parts(weights=1000, graphs=65, kv_cache=4000, kv_in_torch=4000)
    assert parts["workspaces"] == 300 and sum(parts.values()) == device.read().used


def test_storages_are_counted_once() -> None:
    whole = torch.zeros(10, dtype=torch.float32)
    assert storage_bytes([whole, whole[2:], torch.zeros(3, dtype=torch.int8)]) == 43
    assert read_device(torch.device("cpu")) == DeviceBytes()


def test_a_start_on_a_cpu_tells_what_is_known_by_its_tensors() -> None:
    worker = Worker(
        worker_config(num_blocks=40, graph_mode="FULL_DECODE_ONLY"), SPEC, alone_topology()
    )
    ready = worker.start()
    model, kv = worker._started.bench.parts.step.model, worker._started.memory.cache
    weights = sum(each.numel() for each in [*model.parameters(), *model.buffers()])
    assert ready.memory.parts["kv_cache"] == kv.storage.numel() * 4
    assert weights * 4 <= ready.memory.parts["weights"] < weights * 4 * 1.1
    assert (ready.memory.total, ready.memory.budget, ready.memory.estimate_error) == (0, 0, None)
    sizes = [cost.num_tokens for cost in ready.graph_costs]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == MAX_LANES
    assert all(cost.uniform_query_len == 1 and cost.seconds > 0 for cost in ready.graph_costs)
    worker.close()


def measured_config(utilization: float) -> WorkerConfig:
    config = worker_config(graph_mode="FULL_DECODE_ONLY")
    cache = msgspec.structs.replace(
        config.cache, num_gpu_blocks_override=None, gpu_memory_utilization=utilization
    )
    return msgspec.structs.replace(config, cache=cache)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device that counts behind a CPU whose KV cache nothing fixes: what is left is estimated."""
    device = Device(context=10 * MIB, workspaces=90 * MIB)
    monkeypatch.setattr(
        rank_memory, "read_device", lambda _: device.read()._replace(total=400 * MIB)
    )
    monkeypatch.setattr(rank_memory, "fixed_num_blocks", lambda *args: None)
    return device


def test_an_estimate_fills_the_budget_and_its_error_is_told(counted: Device) -> None:
    config = measured_config(0.5)
    manifest = build_manifest(create_dispatcher(config.graph, config.schedule))
    rank = RankMemory(config, alone_topology())
    memory = rank.open(dummy_model(config), manifest, Stages(None))
    # On a host graphs cost nothing; each is taken for the least that a graph may cost.
    estimate = (len(manifest.entries) - 2) * MIB
    used = counted.read().used
    block = memory.cache.layout.block_bytes
    assert memory.cache.num_blocks == (200 * MIB - used - estimate) // block
    counted.taken |= {"workspaces": 90 * MIB + memory.num_bytes, "pool": MIB}
    costs = [GraphCost(8, 1, 0.1, MIB, 4)]
    rank.fill(memory, costs, [])
    report = rank.report(memory, costs)
    assert report.estimate_error == estimate - MIB and report.budget == 200 * MIB
    assert sum(report.parts.values()) == counted.read().used


def test_a_budget_that_is_spent_already_is_refused_with_every_term(counted: Device) -> None:
    config = measured_config(0.2)
    manifest = build_manifest(create_dispatcher(config.graph, config.schedule))
    rank = RankMemory(config, alone_topology())
    terms = r"weights .* \+ graphs .* \+ communication 0\.0 \+ before_start 10\.0 \+ driver"
    with pytest.raises(ValueError, match=f"utilization must be at least 0.255, got 0.2: {terms}"):
        rank.open(dummy_model(config), manifest, Stages(None))
