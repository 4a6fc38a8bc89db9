"""The image: hadolint's rules, and what it must be to run anywhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "Dockerfile"
IGNORED = ROOT / "deploy" / "Dockerfile.dockerignore"
# Of the last stage, which is what runs.
FINAL = FILE.read_text().replace("\\\n", " ").rpartition("\nFROM ")[2].splitlines()


def instruction(name: str) -> str:
    """The one argument of an instruction of the final stage."""
    (found,) = [line.partition(" ")[2].strip() for line in FINAL if line.startswith(f"{name} ")]
    return found


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, FILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_it_runs_as_a_numbered_user_without_rights() -> None:
    uid, _, gid = instruction("USER").partition(":")
    assert int(uid) > 0 and int(gid) > 0


def test_signals_reach_the_command_itself() -> None:
    assert json.loads(instruction("ENTRYPOINT")) == ["lockstep"]
    assert all(isinstance(word, str) for word in json.loads(instruction("CMD")))
    assert instruction("STOPSIGNAL") == "SIGTERM"


def test_the_health_check_needs_no_shell_and_no_curl_and_asks_for_life() -> None:
    command = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    compile(command[2], "health check", "exec")
    assert "http://127.0.0.1:8000/health" in command[2]


def test_bases_are_one_and_pinned_and_have_a_python_of_ours() -> None:
    bases = set(re.findall(r"^FROM (\S+)", FILE.read_text(), re.MULTILINE))
    (base,) = bases
    assert re.fullmatch(r"python:3\.1[12]\.\d+-slim-bookworm", base)


def test_all_that_is_copied_exists_and_is_sent_to_the_builder() -> None:
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", FILE.read_text(), re.MULTILINE)
    names = [name for line in sources for name in line.split()]
    sent = {line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")}
    assert set(names) == sent
    assert all((ROOT / name).exists() for name in names)
