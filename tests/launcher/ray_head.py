"""A Ray head as ``ray start`` makes one, with ports and files of its own, and jobs on it."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from launched import Launched

RAY = [sys.executable, "-P", "-m", "ray.scripts.scripts"]


def auth_token() -> str:
    """The one that Ray takes: of the environment, or of the file that its user has."""
    told = os.environ.get("RAY_AUTH_TOKEN")
    return told or (Path.home() / ".ray" / "auth_token").read_text().strip()


class RayHead:
    """A head with four CPUs and the job server. It needs ``ray[default]``."""

    def __init__(self, folder: Path) -> None:
        # The sockets' paths have a limit that the folders of tests come near.
        self._files = tempfile.mkdtemp(prefix="lockstep-", dir="/tmp")
        options = [
            "--port=0", "--dashboard-port=0", f"--ray-client-server-port={free_port()}",
            # Without it no job can be taken while another Ray of this machine holds the usual one.
            f"--dashboard-agent-listen-port={free_port()}",
            "--num-cpus=4", f"--object-store-memory={80 << 20}", f"--temp-dir={self._files}",
        ]  # fmt: skip
        # Entrypoints are run by name, and what a job imports is to be what it has brought.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._head = Launched(
            [*RAY, "start", "--head", "--block", *options], folder,
            PATH=path, PYTHONPATH="", PIP_NO_DEPS="1", OMP_NUM_THREADS="1",
        )  # fmt: skip
        self.url, self.address = "", ""

    def await_ready(self) -> None:
        deadline = time.monotonic() + 90
        while not self._told():
            assert self._head.root.poll() is None and time.monotonic() < deadline, self._stdout()
            time.sleep(0.1)

    def close(self) -> None:
        self._head.clean_up()
        shutil.rmtree(self._files, ignore_errors=True)

    def run(self, *command: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
        """``ray job COMMAND`` against this head, its output in one piece."""
        env = os.environ | {"RAY_API_SERVER_ADDRESS": self.url, "PYTHONPATH": ""}
        deadline = time.monotonic() + timeout_s
        while True:
            done = subprocess.run(
                [*RAY, "job", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, env=env, timeout=timeout_s,
            )  # fmt: skip
            # A head tells its address before it can take jobs.
            if "No available agent" not in done.stdout or time.monotonic() > deadline:
                return done

    def details(self, job: str) -> dict[str, Any]:
        """What Ray knows of a job."""
        request = urllib.request.Request(
            f"{self.url}/api/jobs/{job}", headers={"Authorization": f"Bearer {auth_token()}"}
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            found: dict[str, Any] = json.load(reply)
            return found

    def actors_left(self, timeout_s: float) -> list[str]:
        """Command lines of our actors that are still there after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while (left := self._actors()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _actors(self) -> list[str]:
        lines = [line for line, _ in self._head.processes().values()]
        return [line for line in lines if "WorkerActor" in line or "SchedulerActor" in line]

    def _stdout(self) -> str:
        return (self._head.folder / "stdout").read_text() + self._head.stderr

    def _told(self) -> bool:
        text = re.sub(r"\x1b\[\d+m", "", self._stdout())
        url = re.search(r"RAY_API_SERVER_ADDRESS='(\S+)'", text)
        address = re.search(r"ray start --address='(\S+)'", text)
        if url is None or address is None:
            return False
        self.url, self.address = url[1], address[1]
        return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
