"""Where the Triton kernels can run here: on CUDA, or interpreted on the CPU."""

import importlib.util
import os

import numpy as np
import pytest
import torch


def kernel_device() -> torch.device:
    """CUDA if there is one; else the CPU, with Triton told to interpret. Skips if neither can be.

    To be called before the first import of a kernel.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs a CUDA GPU, or Triton to interpret its kernels", allow_module_level=True)
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton's interpreter needs numpy below 2.4", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")


def kernel_marks() -> list[pytest.MarkDecorator]:
    """Of a module whose kernels run on ``kernel_device``: a test of a GPU where there is one."""
    if torch.cuda.is_available():
        return [pytest.mark.gpu]
    # The interpreter turns one-element arrays into loop bounds, which numpy is about to forbid.
    ignored = "ignore:Conversion of an array:DeprecationWarning"
    return [pytest.mark.filterwarnings(ignored)]
