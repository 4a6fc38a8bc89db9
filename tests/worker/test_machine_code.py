"""What no interpreter shows: that parts which are assembly can be assembled, how results leave."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "deploy" / "package"


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton's compiler"
)


def _printed_by(script: str, *arguments: str, cache: Path) -> list[str]:
    paths = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    own = {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        capture_output=True, text=True, env=os.environ | own, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_fused_sum_is_machine_code_for_up_to_eight_ranks(tmp_path: Path) -> None:
    printed = _printed_by("machine_code.py", "8192", "2", "4", "8", cache=tmp_path)
    numbers = list(map(int, printed))
    one_row, several, two_lines = numbers[::3], numbers[1::3], numbers[2::3]
    for two, four, eight in (one_row, several):
        assert 0 < two < four < eight, "each waits for more sources"
    assert two_lines == [0] * 3, "what a warp stores at once has no gaps"


@pytest.mark.parametrize("end", ["plain", "adding"])
def test_products_of_few_rows_are_stored_sixteen_bytes_at_a_time(end: str, tmp_path: Path) -> None:
    stores = _printed_by("few_rows_code.py", "6144", "4096", "32", end, cache=tmp_path)
    squares = ["st.global.b32"] if end == "adding" else []
    assert stores == [*squares, "st.global.v4.b32"]
