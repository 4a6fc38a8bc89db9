"""Asking about GPUs without opening a context on one."""

import subprocess
import sys

import pytest
import torch

from lockstep.launcher.gpu import gpu_capability


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_capability() -> None:
    assert gpu_capability() is None


@pytest.mark.gpu
def test_the_driver_is_asked_and_no_context_opened() -> None:
    check = (
        "import torch\n"
        "from lockstep.launcher.gpu import gpu_capability\n"
        "found = gpu_capability()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert found == torch.cuda.get_device_capability(0), found\n"
    )
    subprocess.run([sys.executable, "-P", "-c", check], check=True, timeout=100)
