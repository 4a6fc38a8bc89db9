"""A server without Ray of which one process is stopped (SIGSTOP), with nobody else to see it.

LOCKSTEP_SOAK_STOPS=1 stops each of its processes in turn.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers import Server, streams
from test_torchrun import free_port

Seen = dict[str, Any]

MODULE = "lockstep.launcher.torchrun"
FLAGS = (
    "-tp 2 --load-format dummy --enforce-eager --port 0 --kv-cache-memory-bytes 2000000 "
    "--max-num-seqs 4 --device cpu --host 127.0.0.1"
)


@contextmanager
def two_ranks(folder: Path, model: str) -> Iterator[Server]:
    """Two ranks as srun starts them; the shell ends as rank 0 does, and nothing else ends them."""
    rank = f"SLURM_PROCID=$R SLURM_LOCALID=$R {sys.executable} -P -m {MODULE} serve {model} {FLAGS}"
    env = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "MASTER_PORT": free_port()}
    line = f"R=1; {rank} & R=0; {rank}; code=$?; wait; exit $code"
    server = Server(["bash", "-c", line], folder, **env)
    try:
        server.await_ready(180)
        yield server
    finally:
        server.clean_up()


def rank_1_stopped(folder: Path, model: str) -> Seen:
    return _rank_stopped(folder, model, "1")


def rank_0_stopped(folder: Path, model: str) -> Seen:
    return _rank_stopped(folder, model, "0")


def front_end_stopped(folder: Path, model: str) -> Seen:
    """Nobody can hear of that from ``/ready``; what is open breaks off."""
    with two_ranks(folder, model) as server:
        streams(server, 2, max_tokens=400)
        pid = server.find(f"{MODULE}_front")
        os.kill(pid, signal.SIGSTOP)
        return {"pid": pid, "code": server.ended(120), "stderr": server.stderr}


RANK_STOPS = {rank_1_stopped: 4, rank_0_stopped: 128 + signal.SIGKILL}
SOAK = "LOCKSTEP_SOAK_STOPS" in os.environ
if not SOAK:
    del RANK_STOPS[rank_0_stopped]


def _rank_stopped(folder: Path, model: str, rank: str) -> Seen:
    """What two streams, ``/ready`` and the command say of it."""
    with two_ranks(folder, model) as server:
        pid = server.find(f"{MODULE} ", SLURM_PROCID=rank)
        two = streams(server, 2, max_tokens=400)
        os.kill(pid, signal.SIGSTOP)
        seconds, report = _report_of_death(server)
        for one in two:
            one.join(120)
        seen = {"pid": pid, "rank": rank, "streams": two, "seconds": seconds, "ready": report}
        return seen | {"code": server.ended(120), "stderr": server.stderr}


def _report_of_death(server: Server) -> tuple[float, Any]:
    """Seconds until ``/ready`` says that the engine is dead, and what it says."""
    began = time.monotonic()
    while (answer := server.ask("/ready"))[0] == 200:
        time.sleep(0.1)
    return time.monotonic() - began, answer[1]
