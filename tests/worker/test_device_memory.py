"""Memory mapped behind reserved addresses: bookkeeping with a fake driver, the real one on CUDA."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.worker import device_memory
from lockstep.worker.device_memory import MappedRange, is_available, unavailable_reason

UNIT = 1 << 21
BASE = 1 << 40


class FakeDriver:
    """Keeps the books of one device with ``free`` bytes and checks what it is told."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"))
    NO_MEMORY = SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY")

    def __init__(self, free: int) -> None:
        self.free = free
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.refuse_access = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return _Anything()
        raise AttributeError(name)

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple[Any, int]:
        return self.CUresult.CUDA_SUCCESS, UNIT

    def cuMemAddressReserve(self, size: int, *rest: int) -> tuple[Any, int]:
        assert size % UNIT == 0
        self.reserved[BASE] = size
        return self.CUresult.CUDA_SUCCESS, BASE

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, int]:
        if size > self.free:
            return self.NO_MEMORY, 0
        self.free -= size
        self.handles[len(self.handles) + 1] = size
        return self.CUresult.CUDA_SUCCESS, len(self.handles)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any]:
        assert self.handles[handle] == size and address not in self.mapped
        assert BASE <= address and address + size <= BASE + self.reserved[BASE]
        self.mapped[address] = size
        return (self.CUresult.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: int) -> tuple[Any]:
        if self.handles[handle] not in self.mapped.values():
            self.free += self.handles[handle]
        return (self.CUresult.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any]:
        assert self.mapped[address] == size and len(access) == count == 1
        if self.refuse_access:
            return (self.NO_MEMORY,)
        self.accessible.add(address)
        return (self.CUresult.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any]:
        assert self.mapped.pop(address) == size
        self.free += size
        return (self.CUresult.CUDA_SUCCESS,)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any]:
        assert not self.mapped and self.reserved.pop(address) == size
        return (self.CUresult.CUDA_SUCCESS,)


class _Anything:
    """Stands for the driver's structs and enums, which the fake does not look at."""

    def __getattr__(self, name: str) -> "_Anything":
        child = _Anything()
        object.__setattr__(self, name, child)
        return child

    def __call__(self) -> "_Anything":
        return _Anything()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver(free=10 * UNIT)
    bindings = ModuleType("cuda.bindings")
    bindings.driver = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(device_memory, "_make_context", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    yield fake


CUDA = torch.device("cuda", 0)


def test_maps_in_whole_units_and_never_less_than_before(driver: FakeDriver) -> None:
    with MappedRange(7 * UNIT - 5, CUDA) as memory:
        assert memory.reserved_bytes == 7 * UNIT
        assert [memory.map_up_to(n) // UNIT for n in (0, 1, UNIT, UNIT + 1, 3, 7 * UNIT)] == [
            0, 1, 1, 2, 2, 7,
        ]  # fmt: skip
        assert driver.mapped == {BASE: UNIT, BASE + UNIT: UNIT, BASE + 2 * UNIT: 5 * UNIT}
        assert driver.accessible == set(driver.mapped)
        assert driver.free == 3 * UNIT
    assert driver.free == 10 * UNIT
    assert not driver.reserved
    memory.close()


def test_a_refusal_by_the_driver_changes_nothing_and_says_what_was_asked(
    driver: FakeDriver,
) -> None:
    with MappedRange(40 * UNIT, CUDA) as memory:
        memory.map_up_to(4 * UNIT)
        with pytest.raises(RuntimeError, match=rf"create {7 * UNIT} bytes .*OUT_OF_MEMORY"):
            memory.map_up_to(11 * UNIT)
        driver.refuse_access = True
        with pytest.raises(RuntimeError, match="could not set access"):
            memory.map_up_to(5 * UNIT)
        assert memory.mapped_bytes == 4 * UNIT
        assert driver.free == 6 * UNIT
        driver.refuse_access = False
        assert memory.map_up_to(10 * UNIT) == 10 * UNIT


def test_bad_sizes_are_refused_with_their_limits(driver: FakeDriver) -> None:
    with pytest.raises(ValueError, match="reserve_bytes must be positive, got 0"):
        MappedRange(0, CUDA)
    with MappedRange(UNIT, CUDA) as memory:
        with pytest.raises(ValueError, match=rf"at most {UNIT} \(reserved\), got {UNIT + 1}"):
            memory.map_up_to(UNIT + 1)
        with pytest.raises(ValueError, match=r"must take 1 to 2097152 bytes"):
            memory.tensor((UNIT,), torch.float32)
        with pytest.raises(ValueError, match="mapped_bytes must be above 0"):
            memory.tensor((4,), torch.float32)


def test_a_cpu_has_no_mapped_memory() -> None:
    assert not is_available(torch.device("cpu"))
    assert unavailable_reason(torch.device("cpu")) == "device cpu is not a CUDA device"


@pytest.mark.gpu
def test_a_view_stays_valid_while_more_is_mapped_and_graphs_write_there() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert unavailable_reason(device) is None
    free_before = torch.cuda.mem_get_info(device)[0]
    with MappedRange(64 << 30, device) as memory:
        memory.map_up_to(1)
        view = memory.tensor((32 << 30,), torch.bfloat16)
        address = view.data_ptr()
        view[:8].zero_()
        last = (8 << 30) - 1
        torch.zeros(1, dtype=torch.bfloat16, device=device).fill_(1.0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            view[last:].narrow(0, 0, 1).fill_(1.0)
        memory.map_up_to(16 << 30)
        # Other memory of this process may come back meanwhile, a few MiB at most.
        assert free_before - torch.cuda.mem_get_info(device)[0] > (16 << 30) - (64 << 20)
        view[last].zero_()
        graph.replay()
        assert view[last].item() == 1.0
        assert view[0].item() == 0.0
        assert view.data_ptr() == memory.tensor((4,), torch.int8).data_ptr() == address
        del view
    torch.cuda.empty_cache()
    assert free_before - torch.cuda.mem_get_info(device)[0] < 1 << 30


@pytest.mark.gpu
def test_more_than_the_device_has_is_refused_and_leaves_the_range_usable() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.mem_get_info(device)[1]
    with MappedRange(2 * total, device) as memory:
        memory.map_up_to(1 << 21)
        with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
            memory.map_up_to(2 * total)
        view = memory.tensor((16,), torch.float32)
        view.fill_(3.0)
        assert view.sum().item() == 48.0
