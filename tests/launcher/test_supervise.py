"""Supervision without Ray: which cause is reported, who is ended, what silence means."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lockstep.launcher import supervise
from lockstep.launcher.processes import ProcessId, end_processes, this_process, wait_gone
from lockstep.launcher.supervise import Failure, Role, Sign, Supervisor


class FakeMember:
    def __init__(self, name, role=Role.WORKER, process=None):
        self.name, self.role, self.process = name, role, process
        self.last_step = None
        self.sign, self.answers, self.killed = None, True, False

    def failure(self):
        return self.sign

    def heard(self):
        return self.answers

    def kill(self):
        self.killed = True
        raise ConnectionError("already gone")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(supervise, "PERIOD_S", 0.01)
    monkeypatch.setattr(supervise, "SETTLE_S", 0.2)
    monkeypatch.setattr(supervise, "POLITE_S", 0.1)


@pytest.fixture
def members():
    return [FakeMember("rank 0"), FakeMember("rank 1"), FakeMember("the scheduler", Role.SCHEDULER)]


@pytest.fixture
def supervisor(members):
    supervisor = Supervisor(members)
    supervisor.start()
    yield supervisor
    supervisor.stop()


@pytest.fixture
def sleeper():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(f"/proc/{child.pid}/stat") as file:
        started = int(file.read().rpartition(")")[2].split()[19])
    yield child, ProcessId(child.pid, started)
    child.kill()
    child.wait()


def eventual_cause(supervisor):
    """The cause, however slow the machine: the limits of these tests leave no room for that."""
    tries = (supervisor.await_cause() for _ in range(50))
    return next(cause for cause in tries if cause is not None)


def test_nothing_is_ended_while_all_is_well(supervisor, members):
    time.sleep(0.2)
    assert supervisor.cause is None
    assert not any(member.killed for member in members)


def test_the_sign_nearest_to_the_cause_wins_though_it_shows_last(supervisor, members):
    members[2].sign = Failure(Sign.SAW_ANOTHER_FAIL, "failed: rank 1 gave no result")
    time.sleep(0.05)
    members[0].sign = Failure(Sign.RAISED, "failed: CommError")
    time.sleep(0.05)
    members[1].sign = Failure(Sign.DIED, "died: killed")
    cause = eventual_cause(supervisor)
    assert cause[:3] == (Sign.DIED, Role.WORKER, "rank 1 died: killed")


def test_all_that_die_with_a_rank_are_ended_though_ending_them_fails(supervisor, members):
    members[0].sign = Failure(Sign.RAISED, "failed")
    assert eventual_cause(supervisor) is not None
    supervisor.stop()
    assert all(member.killed for member in members)


def test_a_silent_process_is_hung_and_named(supervisor, members, monkeypatch):
    monkeypatch.setattr(supervise, "HANG_S", 0.2)
    supervisor.serving()
    members[1].answers = False
    cause = eventual_cause(supervisor)
    assert cause.sign is Sign.HUNG and cause.text.startswith("rank 1 hangs")


def test_a_stopped_process_is_the_cause_of_what_others_see_before_its_silence_counts(
    supervisor, members, sleeper
):
    child, members[1].process = sleeper
    os.kill(child.pid, signal.SIGSTOP)
    members[2].sign = Failure(Sign.SAW_ANOTHER_FAIL, "failed: rank 1 is lost")
    cause = eventual_cause(supervisor)
    assert cause.sign is Sign.HUNG and cause.text == f"rank 1, pid {child.pid}, hangs: stopped"


def test_silence_before_serving_has_a_longer_limit(supervisor, members, monkeypatch):
    monkeypatch.setattr(supervise, "HANG_S", 0.1)
    members[1].answers = False
    time.sleep(0.4)
    assert supervisor.cause is None


def test_processes_of_the_engine_are_gone_when_the_supervisor_has_stopped(sleeper):
    child, process = sleeper
    os.kill(child.pid, signal.SIGSTOP)
    member = FakeMember("rank 0", process=process)
    supervisor = Supervisor([member])
    supervisor.start()
    member.sign = Failure(Sign.RAISED, "failed")
    assert eventual_cause(supervisor) is not None
    supervisor.stop()
    assert process.gone


def test_a_reused_pid_is_not_killed(sleeper):
    _, process = sleeper
    other = ProcessId(process.pid, process.started - 1)
    assert other.gone
    assert end_processes([other], timeout_s=1.0) == []
    assert not process.gone and wait_gone([process], timeout_s=0.05) == [process]
    assert end_processes([process], timeout_s=60.0) == []


def test_this_process_is_not_gone():
    assert not this_process().gone
