"""One thread per process, markers that skip with their reason, no child left behind."""

import multiprocessing
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch asks for the names of addresses it only logs: a name server that is silent costs 5 s each.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
# NVLink multicast can take down GPUs of a host that others share.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import pytest
from hypothesis import settings

# How long an example takes says more of the machine than of the code.
settings.register_profile("lockstep", deadline=None)
settings.load_profile("lockstep")

_GPUS_NEEDED = {"gpu": 1, "multigpu": 2}


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, needed in _GPUS_NEEDED.items():
        if item.get_closest_marker(marker) and _num_gpus() < needed:
            pytest.skip(f"needs {needed} CUDA GPU(s), found {_num_gpus()}")


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    """Fail a test that leaves a process it started with multiprocessing."""
    before = set(multiprocessing.active_children())
    yield
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.kill()
        process.join()
    assert not left, f"processes left running: {sorted(process.name for process in left)}"
