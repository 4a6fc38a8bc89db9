"""One of many ranks is killed while it decodes: it is named, and nothing of the engine is left."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import launched
import pytest
from launched import Launched, generate_arguments
from ranks import num_gpus

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PACKAGE = Path(launched.__file__).parents[2] / "deploy" / "package"
ASKED = "LOCKSTEP_TEST_RANKS"
# Room for two answers that take seconds also on GPUs.
SETTINGS = "--max-num-seqs 2 --max-model-len 32768 --num-gpu-blocks-override 3800"
MAX_TOKENS = 30_000
MODEL = PACKAGE.parents[1] / "tests" / "data" / "models" / "eight-heads" / "config.json"


def check_killed(folder: Path, num_ranks: int, device: str) -> None:
    """Start that many ranks, kill one, and look at what the command says and leaves."""
    argv = generate_arguments(folder, max_tokens=MAX_TOKENS, tp=num_ranks)
    shutil.copy(MODEL, folder)
    command = [sys.executable, "-P", "-m", "lockstep", *argv, *SETTINGS.split(), "--device", device]
    paths = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    shared_memory = set(os.listdir("/dev/shm"))
    running = Launched(command, folder, PYTHONPATH=paths)
    try:
        running.await_text("scheduler:", 400)
        lines = running.processes().items()
        ranks = [pid for pid, (line, _) in lines if "ray::WorkerActor" in line]
        assert len(ranks) == num_ranks
        os.kill(ranks[-1], signal.SIGKILL)
        assert running.ended(120) == 4, running.stderr
    finally:
        running.clean_up()
    told = rf"lockstep: rank \d+ .*, pid {ranks[-1]},.* died.*"
    assert any(re.fullmatch(told, line) for line in running.stderr.splitlines()), running.stderr
    assert set(os.listdir("/dev/shm")) <= shared_memory


@pytest.mark.skipif(ASKED not in os.environ, reason=f"make ranks: {ASKED} is not set")
def test_a_killed_rank_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    check_killed(tmp_path, int(os.environ[ASKED]), "cpu")


def free_mib() -> list[int]:
    """Of every GPU, as another process sees it."""
    gpus = f"[torch.cuda.mem_get_info(i)[0] >> 20 for i in range({num_gpus()})]"
    ask = f"import torch; print(*{gpus})"
    told = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=100
    )
    return [int(each) for each in told.stdout.split()]


@pytest.mark.multigpu
def test_a_killed_rank_is_named_and_leaves_no_memory_on_any_gpu(tmp_path: Path) -> None:
    before = free_mib()
    check_killed(tmp_path, num_gpus(), "cuda")
    deadline = time.monotonic() + 20
    while (after := free_mib()) != before and time.monotonic() < deadline:
        time.sleep(0.5)
    assert after == pytest.approx(before, abs=64)
