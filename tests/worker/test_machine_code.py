"""Kernels that no interpreter runs whole, since parts of them are assembly, can be assembled."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "deploy" / "package"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")
def test_the_fused_sum_is_machine_code_for_up_to_eight_ranks(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    own = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(HERE / "machine_code.py"), "8192", "2", "4", "8"],
        capture_output=True, text=True, env=os.environ | own, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    two, four, eight = map(int, done.stdout.split())
    assert 0 < two < four < eight, "each waits for more sources"
