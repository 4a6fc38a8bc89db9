"""Runs a script that compiles kernels without a GPU: in a process that does not interpret them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "deploy" / "package"


def needs_compiler() -> pytest.MarkDecorator:
    """The mark of a module that needs Triton, but no GPU."""
    missing = importlib.util.find_spec("triton") is None
    return pytest.mark.skipif(missing, reason="needs Triton's compiler")


def printed_by(script: str, *arguments: str, cache: Path) -> str:
    """What the script beside this file prints."""
    paths = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    own = {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        capture_output=True, text=True, env=os.environ | own, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
