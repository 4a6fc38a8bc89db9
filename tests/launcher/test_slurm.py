"""The Slurm scripts: shellcheck, and runs of them on two nodes that are both this machine."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import Launched, answers, generate_arguments, tokens_of_one_rank_alone
from ray_head import free_port

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "deploy" / "slurm"
NAMES = sorted(path.name for path in SCRIPTS.iterdir())
FAKES = {
    "srun": f'exec {sys.executable} {Path(__file__).with_name("fake_srun.py")} "$@"',
    "scontrol": 'echo "127.0.0.1"',
    "ray": 'echo "$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN} $RAY_TMPDIR: $*"',
}


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH with stand-ins for the programs of a cluster."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, line in FAKES.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def job(name: str, arguments: list[str], folder: Path, path: str) -> Launched:
    """``sbatch`` of a script: two nodes with a task each."""
    return Launched(
        ["bash", str(SCRIPTS / name), *arguments], folder,
        PATH=path, LOCKSTEP_PYTHON=sys.executable, PYTHONPATH=str(ROOT / "deploy" / "package"),
        OMP_NUM_THREADS="1", MASTER_PORT=str(free_port()), SLURM_JOB_ID="4242",
        SLURM_JOB_NUM_NODES="2", SLURM_NTASKS_PER_NODE="1", SLURM_JOB_NODELIST="127.0.0.1",
    )  # fmt: skip


@pytest.fixture
def started(tmp_path: Path, programs: str) -> Iterator[dict[str, Launched]]:
    """Both scripts that start ranks, side by side, each with two replicas on two nodes."""
    commands = {}
    for name in ("srun.sbatch", "torchrun.sbatch"):
        folder = tmp_path / name
        folder.mkdir()
        arguments = [*generate_arguments(folder, max_tokens=8, tp=1), "-dp", "2"]
        commands[name] = job(name, arguments, folder, programs)
    yield commands
    for command in commands.values():
        command.clean_up()


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [shellcheck, *(SCRIPTS / name for name in NAMES)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_signals_reach_what_the_script_starts(name: str) -> None:
    """The shell is replaced by its last command, which hears of the time limit in time."""
    text = (SCRIPTS / name).read_text()
    assert re.findall(r"^(?:exec )?srun", text, re.MULTILINE) == ["exec srun"]
    assert "--kill-on-bad-exit=1" in text
    if name != "ray.sbatch":
        assert "#SBATCH --signal=B:TERM@180" in text


@pytest.mark.slow
def test_replicas_on_two_nodes_give_the_tokens_of_one_rank_alone(
    started: dict[str, Launched], tmp_path: Path
) -> None:
    for name, command in started.items():
        assert command.root.wait(240) == 0, f"{name}\n{command.stderr}"
        assert answers(command.folder) == tokens_of_one_rank_alone(tmp_path)
        assert "2 ranks (tp 1 x dp 2)" in command.stderr


def test_ray_gets_a_token_files_of_the_job_and_the_command(tmp_path: Path, programs: str) -> None:
    command = job("ray.sbatch", ["generate", "--model", "a b"], tmp_path, programs)
    assert command.root.wait(120) == 0, command.stderr
    assert (command.folder / "stdout").read_text().splitlines() == 2 * [
        "token 64 /tmp/ray-4242: symmetric-run --address 127.0.0.1:24242 --min-nodes 2 "
        "-- env RAY_ADDRESS=127.0.0.1:24242 lockstep generate --model a b"
    ]
