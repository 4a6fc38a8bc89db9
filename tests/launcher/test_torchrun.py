"""The start without Ray: same tokens as one rank alone, and nothing left whatever dies.

All commands run side by side; each has an agent, two ranks and a front end.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launched
import pytest
from launched import Launched, answers, generate_arguments, tokens_of_one_rank_alone

pytestmark = pytest.mark.timeout(400)

PACKAGE = Path(launched.__file__).parents[2] / "deploy" / "package"
RUN = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
MODULE = "lockstep.launcher.torchrun"


def launch(folder: Path, *, max_tokens: int) -> Launched:
    folder.mkdir()
    command = [*RUN, "-m", MODULE, *generate_arguments(folder, max_tokens=max_tokens)]
    return Launched(command, folder, PYTHONPATH=str(PACKAGE), OMP_NUM_THREADS="1")


def launch_on_two_nodes(folder: Path, *, max_tokens: int) -> Launched:
    """Two agents, each with a replica; the nodes differ by their number only."""
    folder.mkdir()
    arguments = [*generate_arguments(folder, max_tokens=max_tokens, tp=1), "-dp", "2"]
    agent = [*RUN[:4], "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    agent += [f"--master-port={free_port()}", "--node-rank=$N", "-m", MODULE, *arguments]
    line = " ".join(agent)
    command = ["bash", "-c", f"N=1; {line} & N=0; {line}; code=$?; wait; exit $code"]
    return Launched(command, folder, PYTHONPATH=str(PACKAGE), OMP_NUM_THREADS="1")


def launch_as_srun_does(folder: Path, *, max_tokens: int) -> Launched:
    folder.mkdir()
    arguments = shlex.join(generate_arguments(folder, max_tokens=max_tokens))
    rank = f"SLURM_PROCID=$R SLURM_LOCALID=$R {sys.executable} -P -m {MODULE} {arguments} &"
    env = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "MASTER_PORT": free_port()}
    command = ["bash", "-c", f"for R in 0 1; do {rank} done; wait"]
    return Launched(command, folder, PYTHONPATH=str(PACKAGE), OMP_NUM_THREADS="1", **env)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def finishes(command: Launched) -> None:
    command.root.wait(180)


def finishes_on_two_nodes(command: Launched) -> None:
    command.root.wait(180)


def agent_killed_while_loading(command: Launched) -> None:
    command.await_text("load ...")
    os.kill(command.root.pid, signal.SIGKILL)


def agent_killed_while_decoding(command: Launched) -> None:
    command.await_text("mapping:")
    os.kill(command.root.pid, signal.SIGKILL)


def rank_killed_while_decoding(command: Launched) -> None:
    command.await_text("mapping:")
    os.kill(command.find("torchrun ", RANK="1"), signal.SIGKILL)


def rank_killed_while_loading_under_srun(command: Launched) -> None:
    """Nobody but the other ranks does anything about it."""
    command.await_text("load ...")
    os.kill(command.find("torchrun ", SLURM_PROCID="1"), signal.SIGKILL)


def front_end_killed_while_decoding(command: Launched) -> None:
    command.await_text("mapping:")
    os.kill(command.find("torchrun_front"), signal.SIGKILL)


CASES = {
    finishes: 8,
    finishes_on_two_nodes: 8,
    agent_killed_while_loading: 4000,
    agent_killed_while_decoding: 4000,
    rank_killed_while_decoding: 4000,
    front_end_killed_while_decoding: 4000,
    rank_killed_while_loading_under_srun: 4000,
}


START = {
    finishes_on_two_nodes: launch_on_two_nodes,
    rank_killed_while_loading_under_srun: launch_as_srun_does,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of each case its exit code or what was wrong, its standard error, its folder."""
    root = tmp_path_factory.mktemp("commands")
    commands = {
        act: START.get(act, launch)(root / act.__name__, max_tokens=n) for act, n in CASES.items()
    }

    def outcome(act):
        command = commands[act]
        try:
            act(command)
            return command.ended(), command.stderr, command.folder
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return error, command.stderr, command.folder
        finally:
            command.clean_up()

    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(outcome, CASES), strict=True))


def test_the_tokens_are_those_of_one_rank_alone_and_come_once(outcomes, tmp_path):
    code, stderr, folder = outcomes[finishes]
    assert code == 0, stderr
    assert answers(folder) == tokens_of_one_rank_alone(tmp_path)
    assert [len(ids) for ids in answers(folder)] == [8, 8]
    assert stderr.count("2 requests") == 1 and "2 ranks (tp 2 x dp 1)" in stderr


def test_replicas_on_two_nodes_give_the_tokens_of_one_rank_alone(outcomes, tmp_path):
    code, stderr, folder = outcomes[finishes_on_two_nodes]
    assert code == 0, stderr
    assert answers(folder) == tokens_of_one_rank_alone(tmp_path)
    assert "2 ranks (tp 1 x dp 2)" in stderr


@pytest.mark.parametrize("act", [agent_killed_while_loading, agent_killed_while_decoding])
def test_a_killed_agent_leaves_nothing(outcomes, act):
    code, stderr, _ = outcomes[act]
    assert code == -signal.SIGKILL, stderr


def test_a_killed_rank_ends_the_command_and_is_named(outcomes):
    code, stderr, _ = outcomes[rank_killed_while_decoding]
    assert code == 1
    assert "rank      : 1 (local_rank: 1)" in stderr and "exitcode  : -9" in stderr


def test_ranks_that_only_have_each_other_name_the_killed_one_and_end(outcomes):
    code, stderr, _ = outcomes[rank_killed_while_loading_under_srun]
    assert code == 0, "of the shell"
    assert re.search(r"rank 1(, pid \d+, died| is lost)", stderr), stderr


def test_a_killed_front_end_ends_every_rank(outcomes):
    code, stderr, _ = outcomes[front_end_killed_while_decoding]
    assert code == 1, stderr
    assert "the front end, pid" in stderr or "the writer" in stderr


@pytest.mark.parametrize(
    ("env", "argv", "code", "message"),
    [
        ({}, [], 2, "not in the environment: RANK, LOCAL_RANK, WORLD_SIZE"),
        ({"WORLD_SIZE": "1"}, ["-tp", "2"], 2, "WORLD_SIZE is 1, but tensor_parallel_size 2"),
        ({"WORLD_SIZE": "1"}, ["--tpp", "2"], 2, "unrecognized arguments: --tpp"),
    ],
)
def test_what_cannot_start_says_why_and_exits(env, argv, code, message, tmp_path):
    rank = {
        "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(),
    }  # fmt: skip
    arguments = [*generate_arguments(tmp_path, max_tokens=1, tp=1), *argv]
    done = subprocess.run(
        [sys.executable, "-P", "-m", MODULE, *arguments], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(PACKAGE)} | ((rank | env) if env else {}), timeout=180,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert message in done.stderr
