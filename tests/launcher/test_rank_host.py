"""A rank before it is one: its device, its host's shared memory, how it tells of a failure."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from launch_cases import resolved_config

from lockstep.comm.errors import PeerLost
from lockstep.launcher import rank_host, torchrun
from lockstep.launcher.errors import StartError
from lockstep.launcher.front_link import Begin, encode_link
from lockstep.launcher.rank_host import RankHost, claim_device
from lockstep.parallel.rank_spec import RankSpec

SPEC = RankSpec(global_rank=1, world_size=2, dp_rank=0, tp_rank=1, local_rank=1, device="cuda:1")
SEAT = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a rank does, in order, on a host where its GPU is there."""
    calls: list[str] = []
    monkeypatch.setattr(rank_host, "setup_logging", lambda who: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(f"device {index}"))
    return calls


def host_of(worker_type) -> RankHost:
    return RankHost(resolved_config(tp=2).worker, worker_type)


def test_a_device_is_claimed_before_the_worker_is_made(log: list[str]) -> None:
    class Worker:
        def __init__(self, config, spec, store) -> None:
            log.append("made")

        def start(self, progress) -> None:
            log.append("started")

    host_of(Worker).start(SPEC)
    assert log == ["device 1", "made", "started"]


def test_a_device_that_is_not_there_is_named_with_what_is(log, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(StartError, match=r"cuda:2 is not there: .* 2 GPU.s., .*='4,5'"):
        claim_device("cuda:2")
    claim_device("cpu")
    assert log == []


class Store:
    """Rank 0 has said what to load."""

    def wait(self, keys, timeout) -> None:
        assert keys == ["lockstep/begin"]

    def get(self, key: str) -> bytes:
        return encode_link(Begin(resolved_config(tp=2).worker, "cuda")).encode()


def test_a_small_dev_shm_ends_the_start_with_what_is_needed_and_the_flag(
    log, monkeypatch, capsys
) -> None:
    for name, value in SEAT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "setup_logging", lambda who: None)
    monkeypatch.setattr(torchrun, "meet", lambda seat, agent_serves: Store())
    monkeypatch.setattr(torchrun, "_meet_siblings", lambda seat, store: (None, None))
    sizes = SimpleNamespace(f_bavail=16, f_frsize=1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: sizes)
    assert torchrun.main([]) == StartError.exit_code
    told = capsys.readouterr().err
    assert "rank 1 failed" in told and "--shm-size" in told
    assert "/dev/shm has 16 MiB free and 64 MiB are needed" in told


def test_a_rank_logs_its_own_failure_with_its_traceback_and_another_s_in_a_line(
    log, caplog: pytest.LogCaptureFixture
) -> None:
    causes = [ValueError("no tensor"), PeerLost(0, "it gave up (no tensor)")]

    class Worker:
        def __init__(self, config, spec, store) -> None:
            pass

        def start(self, progress) -> None:
            raise causes[0]

    while causes:
        with pytest.raises(type(causes[0])):
            host_of(Worker).start(SPEC)
        causes.pop(0)
    own, other = caplog.records
    assert own.levelno == other.levelno == logging.ERROR
    assert own.exc_info is not None and isinstance(own.exc_info[1], ValueError)
    assert other.exc_info is None and "rank 0 is lost: it gave up" in other.getMessage()
