"""The read-only bandwidth of a device."""

import pytest
import torch

from lockstep.worker import ceiling


def test_the_best_grid_is_what_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    took = {7: 0.5, 14: 0.25, 28: 0.4}
    monkeypatch.setattr(ceiling, "_cuda_readers", lambda buffer: {grid: grid for grid in took})
    monkeypatch.setattr(ceiling, "_buffer", lambda num_bytes, device: torch.zeros(num_bytes // 4))
    monkeypatch.setattr(ceiling, "least_seconds", lambda device, grid, num_calls: took[grid])
    best = ceiling.measure_ceiling(torch.device("cuda"), 1 << 20)
    assert best == ceiling.Ceiling((1 << 20) / 0.25, 1 << 20, 14)


def test_a_cpu_is_measured_by_the_clock() -> None:
    measured = ceiling.measure_ceiling(torch.device("cpu"), 4 << 20)
    assert (measured.num_bytes, measured.grid) == (4 << 20, 0)
    assert 1e6 < measured.bytes_per_s < 1e14


@pytest.mark.gpu
def test_a_gpu_reads_faster_than_it_copies() -> None:
    measured = ceiling.measure_ceiling(torch.device("cuda"))
    source = torch.empty(1 << 28, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    copied = 2 * source.nbytes / begin.elapsed_time(end) * 1e3
    print(f"read {measured.bytes_per_s / 1e12:.3f} TB/s, copy {copied / 1e12:.3f} TB/s")  # noqa: T201
    assert measured.bytes_per_s > 0.95 * copied
