"""Device memory behind addresses that are reserved first and mapped later.

The KV cache is the last tenant of a device: graphs are captured over its addresses while only a
little of it exists, and the rest is mapped when everything else has taken what it needs.
"""

from typing import Any

import torch
from torch import Tensor


class MappedRange:
    """A reserved range of device addresses, real from its start up to ``mapped_bytes``.

    Views stay valid while more is mapped, and must not be used after ``close``.

    Raises:
        ValueError: reserve_bytes is not positive.
        RuntimeError: the driver refused; the message has its reason and the sizes.
    """

    def __init__(self, reserve_bytes: int, device: torch.device) -> None:
        if reserve_bytes <= 0:
            raise ValueError(f"reserve_bytes must be positive, got {reserve_bytes}")
        from cuda.bindings import driver

        self._driver: Any = driver
        self.device = torch.device("cuda", _ordinal(device))
        _make_context(self.device)
        self._properties = _allocation_properties(driver, self.device.index)
        self.granularity = _granularity(driver, self._properties)
        self.reserved_bytes = _round_up(reserve_bytes, self.granularity)
        self.mapped_bytes = 0
        self._parts: list[tuple[int, int]] = []
        reserved = driver.cuMemAddressReserve(self.reserved_bytes, 0, 0, 0)
        self._address = int(_checked(driver, reserved, f"reserve {self.reserved_bytes} bytes"))

    def map_up_to(self, num_bytes: int) -> int:
        """Make at least the first ``num_bytes`` real; returns ``mapped_bytes``, never less.

        New memory holds anything. What was mapped stays as it is.

        Raises:
            ValueError: more than was reserved.
            RuntimeError: the device has not so much memory; nothing has changed.
        """
        if num_bytes > self.reserved_bytes:
            limit = self.reserved_bytes
            raise ValueError(f"num_bytes must be at most {limit} (reserved), got {num_bytes}")
        wanted = _round_up(num_bytes, self.granularity)
        if wanted > self.mapped_bytes:
            self._map_part(self._address + self.mapped_bytes, wanted - self.mapped_bytes)
            self.mapped_bytes = wanted
        return self.mapped_bytes

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view from the start of the range; only its mapped part may be touched.

        Raises:
            ValueError: nothing is mapped yet, or the shape is larger than the range.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if not 0 < num_bytes <= self.reserved_bytes:
            limit = self.reserved_bytes
            raise ValueError(f"shape {shape} of {dtype} must take 1 to {limit} bytes")
        if not self.mapped_bytes:
            raise ValueError("mapped_bytes must be above 0 before a view is made, got 0")
        raw = torch.as_tensor(_DeviceBytes(self._address, num_bytes), device=self.device)
        return raw.view(dtype).view(shape)

    def close(self) -> None:
        """Wait for the device, then give everything back. May be called twice."""
        if not self._address:
            return
        torch.cuda.synchronize(self.device)
        driver = self._driver
        for address, size in self._parts:
            _checked(driver, driver.cuMemUnmap(address, size), f"unmap {size} bytes")
        self._parts.clear()
        freed = driver.cuMemAddressFree(self._address, self.reserved_bytes)
        self._address = self.mapped_bytes = 0
        _checked(driver, freed, "free the address range")

    def __enter__(self) -> "MappedRange":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _map_part(self, address: int, size: int) -> None:
        driver = self._driver
        created = driver.cuMemCreate(size, self._properties, 0)
        handle = _checked(driver, created, f"create {size} bytes ({self.mapped_bytes} mapped)")
        try:
            _checked(driver, driver.cuMemMap(address, size, 0, handle, 0), f"map {size} bytes")
        finally:
            # The mapping keeps the memory alive; without one, this frees it.
            _checked(driver, driver.cuMemRelease(handle), "release a handle")
        access = _read_write_access(driver, self.device.index)
        try:
            _checked(driver, driver.cuMemSetAccess(address, size, [access], 1), "set access")
        except RuntimeError:
            driver.cuMemUnmap(address, size)
            raise
        self._parts.append((address, size))


def unavailable_reason(device: torch.device) -> str | None:
    """Why a MappedRange cannot be made on this device, or None if it can."""
    if device.type != "cuda":
        return f"device {device} is not a CUDA device"
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"cuda-bindings cannot be imported: {error}"
    _make_context(torch.device("cuda", _ordinal(device)))
    attribute = driver.CUdevice_attribute
    name = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    asked = driver.cuDeviceGetAttribute(name, _ordinal(device))
    if int(_checked(driver, asked, "ask for virtual memory management")):
        return None
    return f"device {device} has no virtual memory management"


def is_available(device: torch.device) -> bool:
    return unavailable_reason(device) is None


class _DeviceBytes:
    """What torch needs to see plain device memory as a tensor; it keeps no memory alive."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _ordinal(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _make_context(device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()


def _allocation_properties(driver: Any, ordinal: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    return properties


def _read_write_access(driver: Any, ordinal: int) -> Any:
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _granularity(driver: Any, properties: Any) -> int:
    option = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(
        _checked(driver, driver.cuMemGetAllocationGranularity(properties, option), "granularity")
    )


def _checked(driver: Any, answer: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, which answers (code, value) or (code,)."""
    code = answer[0]
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver could not {what}: {code.name}")
    return answer[1] if len(answer) > 1 else None


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
