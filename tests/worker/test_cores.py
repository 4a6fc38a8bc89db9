"""Cores as control groups give them: files as a kernel shows them in a container and outside."""

import os
from pathlib import Path

import pytest

from lockstep.launcher.create_actors import threads_per_rank
from lockstep.worker.cores import usable_cores


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process is bound to 200 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(200)))


@pytest.mark.parametrize(
    ("own", "quotas", "expected"),
    [
        ("0::/\n", {"": "400000 100000\n"}, 4),
        ("0::/\n", {"": "max 100000\n"}, 200),
        ("0::/\n", {"": "150000 100000\n"}, 1),
        ("0::/\n", {"": "50000 100000\n"}, 1),
        ("0::/\n", {"": "broken"}, 200),
        ("0::/\n", {}, 200),
        ("0::/a.slice/b.service\n", {"a.slice/b.service": "800000 100000"}, 8),
        ("0::/a/b\n", {"a": "300000 100000", "a/b": "max 100000", "": "900000 100000"}, 3),
        ("12:cpu:/docker/x\n", {}, 200),
    ],
)  # fmt: skip
def test_a_quota_of_any_group_around_a_process_counts(
    own: str, quotas: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, text in quotas.items():
        (tmp_path / "groups" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name / "cpu.max").write_text(text)
    (tmp_path / "own").write_text(own)
    assert usable_cores(tmp_path / "groups", tmp_path / "own") == expected


def test_without_control_groups_the_binding_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path / "none") == 200


def test_ranks_under_ray_share_what_the_quota_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launcher.create_actors.usable_cores", lambda: 4)
    assert threads_per_rank({}, 2) == 2
    assert threads_per_rank({"OMP_NUM_THREADS": "3"}, 2) == 3
