"""The guard ends what carries its mark, and nothing else, when its driver dies or asks."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lockstep.launcher import guard as module
from lockstep.launcher.guard import MARK, Guard, marked

DRIVER = """
import os, subprocess, sys, time
from lockstep.launcher.guard import MARK, Guard
guard = Guard(sys.argv[1])
env = os.environ | {MARK: sys.argv[1]}
stop = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); import time; time.sleep(99)"
subprocess.Popen([sys.executable, "-c", stop], env=env, start_new_session=True)
print("up", flush=True)
time.sleep(99)
"""


def start_marked(mark):
    env = os.environ | {MARK: mark}
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], env=env)


def wait_unmarked(mark, timeout_s):
    deadline = time.monotonic() + timeout_s
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return marked(mark)


def test_finish_ends_what_is_marked_and_spares_the_rest():
    guard = Guard("test-finish")
    ours, other = start_marked("test-finish"), start_marked("test-finish-2")
    assert guard.finish() and guard.finish()
    assert ours.wait(30) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_killed_driver_leaves_nothing():
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, "test-killed"], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout.readline() == "up\n"
    assert len(marked("test-killed")) == 1
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert wait_unmarked("test-killed", 60.0) == []


def test_a_guard_survives_what_a_terminal_sends():
    guard = Guard("test-signals")
    child = start_marked("test-signals")
    time.sleep(0.3)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        guard._process.send_signal(number)
    assert guard.finish()
    assert child.wait(30) == -signal.SIGKILL


def test_a_guard_that_was_killed_is_stood_in_for():
    guard = Guard("test-stand-in")
    child = start_marked("test-stand-in")
    guard._process.kill()
    assert guard.finish()
    assert child.wait(30) == -signal.SIGKILL


def test_a_process_that_is_just_starting_a_program_is_not_overlooked(monkeypatch):
    """Its environment is empty for a moment, here for the three looks after the first kill."""
    plain, starting = start_marked("test-starting"), start_marked("test-starting")
    looks, read = [], module._environment

    def environment(pid):
        if pid != starting.pid:
            return read(pid)
        looks.append(plain.poll())
        return [] if len([look for look in looks if look is not None]) <= 3 else read(pid)

    monkeypatch.setattr(module, "_environment", environment)
    monkeypatch.setattr(module, "_GRACE_S", 0.0)
    assert module._end_marked("test-starting")
    assert starting.wait(30) == plain.wait(30) == -signal.SIGKILL


HOLD = "import sys, time; file = open(sys.argv[1], 'a'); time.sleep(99)"


def start_without_environment(path):
    """As one that has written over it; holds ``path`` open."""
    child = subprocess.Popen([sys.executable, "-IS", "-c", HOLD, str(path)], env={})
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return child


@pytest.mark.parametrize("guard_lives", [True, False])
def test_what_has_lost_its_mark_is_known_by_the_files_of_its_cluster(tmp_path, guard_lives):
    guard = Guard("test-files")
    (tmp_path / "cluster").mkdir()
    ours = start_without_environment(tmp_path / "cluster" / "agent.log")
    other = start_without_environment(tmp_path / "cluster-2.log")
    guard.claim(str(tmp_path / "cluster"))
    if not guard_lives:
        guard._process.kill()
    assert guard.finish()
    assert ours.wait(30) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_head_that_nobody_has_claimed_says_itself_where_its_files_are(tmp_path):
    """Its driver was ended while Ray was still starting."""
    (tmp_path / "cluster").mkdir()
    head = subprocess.Popen(
        [f"{tmp_path}/gcs_server", "-c", "sleep 99; :", f"--session-dir={tmp_path}/cluster"],
        executable="/bin/bash", env=os.environ | {MARK: "test-unclaimed"},
    )  # fmt: skip
    agent = start_without_environment(tmp_path / "cluster" / "agent.log")
    try:
        assert Guard("test-unclaimed").finish()
        assert head.wait(30) == -signal.SIGKILL
        assert agent.wait(5) == -signal.SIGKILL
    finally:
        agent.kill()
        agent.wait()
