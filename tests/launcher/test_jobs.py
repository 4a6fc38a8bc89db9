"""``ray job submit`` and ``stop`` on a real head, and commands that join it by RAY_ADDRESS.

All of them run side by side: most of their time is waiting for Ray.
"""

import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from launched import answers, generate_arguments, tokens_of_one_rank_alone
from ray_head import RayHead, free_port

pytest.importorskip("grpc", reason="needs ray[default]")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "deploy" / "package"
WHERE = "import lockstep; print('imported from', lockstep.__file__)"
NUM_TOKENS = 300


def job_from_a_working_dir(head: RayHead, folder: Path) -> subprocess.CompletedProcess[str]:
    entry = ["python", "-m", "lockstep", *generate_arguments(folder, max_tokens=8)]
    return head.run("submit", "--working-dir", str(PACKAGE), "--", *entry)


def job_that_cannot_start(head: RayHead, folder: Path) -> subprocess.CompletedProcess[str]:
    entry = ["python", "-m", "lockstep", "generate", "--model", str(folder), "Hello"]
    return head.run("submit", "--working-dir", str(PACKAGE), "--", *entry)


def command_that_joins(head: RayHead, folder: Path) -> subprocess.CompletedProcess[str]:
    """A plain command; it asks for more than this cluster has."""
    entry = [*generate_arguments(folder, max_tokens=8, tp=1), "-dp", "50"]
    return subprocess.run(
        [sys.executable, "-P", "-m", "lockstep", *entry, "--placement-timeout-seconds", "1"],
        env=os.environ | {"RAY_ADDRESS": head.address, "PYTHONPATH": str(PACKAGE)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
    )  # fmt: skip


def server_from_a_wheel_stopped(head: RayHead, folder: Path) -> "Stopped":
    wheel, port = build_wheel(folder), free_port()
    generate_arguments(folder, max_tokens=1)
    runtime = {"py_modules": [str(wheel)], "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}
    serve = (
        f"exec python -m lockstep serve {folder} --load-format dummy --device cpu -tp 2 "
        f"--host 127.0.0.1 --port {port} --kv-cache-memory-bytes 4000000"
    )
    script = folder / "entry.sh"
    script.write_text(f'python -c "{WHERE}"\n{serve}\n')
    job = f"serve-{port}"
    submitted = head.run(
        "submit", "--no-wait", "--submission-id", job, "--runtime-env-json", json.dumps(runtime),
        "--", "bash", str(script),
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stdout
    return Stopped(head, job, port)


class Stopped:
    """A server that is told to stop while clients come; what became of it and of them."""

    def __init__(self, head: RayHead, job: str, port: int) -> None:
        self._head, self._job, self._port = head, job, port
        self._await_ready()
        with ThreadPoolExecutor(max_workers=200) as pool:
            stop = pool.submit(head.run, "stop", job)
            answers = [pool.submit(self._answer)]
            while not any(answer.done() and answer.result()[0] == 503 for answer in answers):
                time.sleep(0.1)
                answers.append(pool.submit(self._answer))
            self.answers = [answer.result() for answer in answers]
            self.told = stop.result()
        self.details = head.details(job)
        self.log = head.run("logs", job).stdout

    def _await_ready(self) -> None:
        deadline = time.monotonic() + 200
        while not self._ready():
            told = self._head.details(self._job)
            assert told["status"] in ("PENDING", "RUNNING"), told
            assert time.monotonic() < deadline, self._head.run("logs", self._job).stdout
            time.sleep(0.2)

    def _ready(self) -> bool:
        try:
            with self._asked("GET", "/ready") as reply:
                return reply.status == 200
        except OSError:
            return False

    def _answer(self) -> tuple[int, list[bytes]]:
        """Status and lines of a stream."""
        body = {"prompt": [5, 6, 7], "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        with self._asked("POST", "/v1/completions", json.dumps(body)) as reply:
            return reply.status, [line for line in reply if line.strip()]

    @contextmanager
    def _asked(
        self, method: str, path: str, body: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)) as asking:
            asking.request(method, path, body)
            with closing(asking.getresponse()) as reply:
                yield reply


def build_wheel(folder: Path) -> Path:
    """As ``make wheel`` does it, from the files that the image is built from, and no others."""
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    for name in (line[1:] for line in ignored if line.startswith("!")):
        copy = folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy, symlinks=True)
        else:
            shutil.copy(ROOT / name, copy)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(folder), str(folder / "source")],
        check=True, timeout=120,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


CASES = (
    job_from_a_working_dir,
    job_that_cannot_start,
    command_that_joins,
    server_from_a_wheel_stopped,
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of each case what it returned or raised, and its folder; and the actors left on the head."""
    root = tmp_path_factory.mktemp("jobs")
    folders = {act: root / act.__name__ for act in CASES}
    for folder in (root / "head", *folders.values()):
        folder.mkdir()
    head = RayHead(root / "head")

    def outcome(act):
        try:
            return act(head, folders[act])
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            return error

    try:
        head.await_ready()
        with ThreadPoolExecutor(len(CASES)) as pool:
            done = dict(zip(CASES, pool.map(outcome, CASES), strict=True))
        yield done, folders, head.actors_left(timeout_s=60)
    finally:
        head.close()


def test_a_job_from_a_working_dir_gives_the_tokens_of_one_rank_alone(outcomes, tmp_path):
    done, folder = (each[job_from_a_working_dir] for each in outcomes[:2])
    assert done.returncode == 0, done
    assert answers(folder) == tokens_of_one_rank_alone(tmp_path)
    assert "2 ranks (tp 2 x dp 1) on cpu through ray" in done.stdout


def test_the_exit_code_and_the_cause_come_through_a_job(outcomes):
    done = outcomes[0][job_that_cannot_start]
    assert done.returncode == 1, "Ray has no other code for a job that failed"
    assert "exit code 2" in done.stdout and "lockstep: " in done.stdout


def test_a_command_that_joins_a_cluster_without_room_says_so_in_time(outcomes):
    done = outcomes[0][command_that_joins]
    assert done.returncode == 3, done
    assert "need 50 x 1 CPU" in done.stdout and "have 4 CPU on 1 host(s)" in done.stdout


def test_a_stopped_server_finishes_what_it_has_begun(outcomes):
    stopped = outcomes[0][server_from_a_wheel_stopped]
    assert isinstance(stopped, Stopped), stopped
    assert {status for status, _ in stopped.answers} == {200, 503}
    for *tokens, done in (lines for status, lines in stopped.answers if status == 200):
        assert done == b"data: [DONE]\n" and len(tokens) == NUM_TOKENS
        assert b'"finish_reason":"length"' in tokens[-1]
    assert stopped.told.returncode == 0 and stopped.details["status"] == "STOPPED"
    assert "Traceback" not in stopped.log


def test_a_job_brings_its_wheel(outcomes):
    stopped = outcomes[0][server_from_a_wheel_stopped]
    assert "imported from" in stopped.log
    assert "runtime_resources/py_modules_files" in stopped.log


def test_no_rank_or_scheduler_outlives_its_job(outcomes):
    assert outcomes[2] == []
