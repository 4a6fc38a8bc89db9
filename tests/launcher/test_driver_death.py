"""The command killed from outside, each time with a Ray of its own: nothing stays behind.

All commands run side by side, since most of their time is waiting for Ray.
"""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launch_fakes
import pytest
from launched import Launched, generate_arguments

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

HERE = Path(launch_fakes.__file__).parent
PACKAGE = HERE.parents[1] / "deploy" / "package"


def launch(folder: Path, worker: str) -> Launched:
    folder.mkdir()
    arguments = generate_arguments(folder, max_tokens=4000, tp=1)
    command = [sys.executable, "-P", str(HERE / "launch_driver.py"), worker, *arguments]
    return Launched(command, folder, PYTHONPATH=os.pathsep.join([str(PACKAGE), str(HERE)]))


def killed_while_loading(command: Launched) -> None:
    command.await_path(command.folder / "rank0.pid")
    os.kill(command.root.pid, signal.SIGKILL)


def killed_while_decoding(command: Launched) -> None:
    command.await_text("scheduler:")
    os.kill(command.root.pid, signal.SIGKILL)


def terminated(command: Launched) -> None:
    command.await_text("scheduler:")
    os.kill(command.root.pid, signal.SIGTERM)


def raylet_killed(command: Launched) -> None:
    command.await_text("scheduler:")
    os.kill(command.find("/raylet "), signal.SIGKILL)


def head_killed(command: Launched) -> None:
    command.await_text("scheduler:")
    os.kill(command.find("/gcs_server "), signal.SIGKILL)


def rank_killed(command: Launched) -> None:
    command.await_text("scheduler:")
    os.kill(int((command.folder / "rank0.pid").read_text()), signal.SIGKILL)


CASES = {
    killed_while_loading: "SlowLoader",
    killed_while_decoding: "FakeWorker",
    terminated: "FakeWorker",
    raylet_killed: "FakeWorker",
    head_killed: "FakeWorker",
    rank_killed: "FakeWorker",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of each case its exit code or what was wrong, and its standard error."""
    shared_memory = set(os.listdir("/dev/shm"))
    root = tmp_path_factory.mktemp("commands")
    commands = {act: launch(root / act.__name__, worker) for act, worker in CASES.items()}

    def outcome(act):
        command = commands[act]
        try:
            act(command)
            return command.ended(), command.stderr, command.folder
        except AssertionError as error:
            return error, command.stderr, command.folder
        finally:
            command.clean_up()

    with ThreadPoolExecutor(len(CASES)) as pool:
        results = dict(zip(CASES, pool.map(outcome, CASES), strict=True))
    assert set(os.listdir("/dev/shm")) <= shared_memory
    return results


@pytest.mark.parametrize("act", [killed_while_loading, killed_while_decoding])
def test_a_killed_driver_leaves_nothing(outcomes, act):
    code, _, _ = outcomes[act]
    assert code == -signal.SIGKILL


def test_sigterm_ends_cleanly(outcomes):
    code, stderr, _ = outcomes[terminated]
    assert code == 143
    assert "Traceback" not in stderr


def test_a_killed_raylet_ends_the_command_with_an_error(outcomes):
    code, stderr, _ = outcomes[raylet_killed]
    assert code == 4
    assert stderr.splitlines()[-1].startswith("lockstep: ")


def test_a_killed_head_ends_the_command(outcomes):
    code, stderr, _ = outcomes[head_killed]
    assert isinstance(code, int) and code != 0
    assert "GCS may have been killed" in stderr


def test_a_killed_rank_is_the_last_line_once_and_every_request_has_an_answer(outcomes):
    code, stderr, folder = outcomes[rank_killed]
    assert code == 4
    told = [line for line in stderr.splitlines() if line.startswith("lockstep: rank 0")]
    assert len(told) == 1 and stderr.splitlines()[-1] == told[0] and "died" in told[0]
    records = (folder / "out.jsonl").read_text().splitlines()
    assert len(records) == 2 and all('"error"' in record for record in records)
